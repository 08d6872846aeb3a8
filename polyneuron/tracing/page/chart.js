// Canvases that fit their element, curves over the run, and the histogram.

const theme = { colours: {} };

function colour(name) {
  theme.colours[name] ??= getComputedStyle(document.documentElement)
    .getPropertyValue(`--${name}`)
    .trim();
  return theme.colours[name];
}

// A context in CSS pixels, cleared; the bitmap has the screen's own pixels.
function contextOf(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth,
    height = canvas.clientHeight;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

// Round values about `target` apart, from low to high.
function ticks(low, high, target) {
  if (!(high > low)) return { step: 1, values: [] };
  const rough = (high - low) / Math.max(1, target);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    values.push(i * step || 0);
  return { step, values };
}

const MARGIN = { left: 62, right: 10, top: 8, bottom: 20 };

function frame(context, width, height, x, y) {
  context.fillStyle = colour("soft");
  context.strokeStyle = colour("grid");
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const value of y.ticks) {
    const at = Math.round(y.place(value)) + 0.5;
    context.beginPath();
    context.moveTo(MARGIN.left, at);
    context.lineTo(width - MARGIN.right, at);
    context.stroke();
    context.fillText(y.text(value), MARGIN.left - 6, at);
  }
  for (const value of x.ticks) {
    const at = x.place(value),
      text = x.text(value),
      half = context.measureText(text).width / 2;
    context.textAlign = at + half > width ? "right" : "center";
    context.fillText(text, Math.min(at, width), height - 8);
  }
}

function scaleOf(low, high, from, to) {
  const factor = high > low ? (to - from) / (high - low) : 0;
  return (value) => from + (value - low) * factor;
}

function nothing(context, width, height, text) {
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  context.fillText(text, width / 2, height / 2);
}

// One value a step over the run; of options: canvas, points [{ms, value, step}], spanMs, low, top,
// text(value), colourName, and what to say where there are none.
class Curve {
  constructor(options, onChoose) {
    Object.assign(this, options);
    this.hovered = null;
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.hovered = null;
      hideTip();
      this.draw();
    });
    this.canvas.addEventListener("click", () => this.hovered && onChoose(this.hovered.step));
    this.canvas.style.cursor = this.points.length ? "pointer" : "default";
  }

  draw() {
    const { context, width, height } = contextOf(this.canvas);
    if (!this.points.length) return nothing(context, width, height, this.absent);
    const x = scaleOf(0, this.spanMs, MARGIN.left, width - MARGIN.right);
    const y = scaleOf(this.low, this.top, height - MARGIN.bottom, MARGIN.top);
    const across = ticks(0, this.spanMs, (width - MARGIN.left) / 110);
    const unit = this.unitOf?.(this.top) ?? 1,
      up = ticks(this.low / unit, this.top / unit, 4);
    frame(
      context,
      width,
      height,
      { ticks: across.values, place: x, text: (ms) => moment(ms, across.step) },
      { ticks: up.values.map((value) => value * unit), place: y, text: this.text },
    );
    this.x = x;
    context.save();
    context.beginPath();
    context.rect(
      MARGIN.left,
      MARGIN.top - 3,
      width - MARGIN.left - MARGIN.right,
      height - MARGIN.bottom - MARGIN.top + 5,
    );
    context.clip();
    this.drawPoints(context, x, y, width - MARGIN.left - MARGIN.right);
    context.restore();
    if (this.hovered) {
      context.fillStyle = colour("ink");
      context.beginPath();
      context.arc(x(this.hovered.ms), Math.max(MARGIN.top, y(this.hovered.value)), 3.5, 0, 7);
      context.fill();
    }
  }

  // Where many steps share a pixel: the range they span, and a line through their means.
  drawPoints(context, x, y, pixels) {
    const buckets = [];
    for (const point of this.points) {
      const at = Math.floor(x(point.ms) / 2),
        last = buckets[buckets.length - 1];
      if (last && last.at === at && this.points.length > pixels / 3) {
        last.low = Math.min(last.low, point.value);
        last.high = Math.max(last.high, point.value);
        last.sum += point.value;
        last.count += 1;
      } else
        buckets.push({
          at,
          x: x(point.ms),
          low: point.value,
          high: point.value,
          sum: point.value,
          count: 1,
        });
    }
    const ink = colour(this.colourName);
    context.fillStyle = context.strokeStyle = ink;
    context.globalAlpha = 0.28;
    for (const { x: at, low, high, count } of buckets)
      if (count > 1) context.fillRect(at, y(high), 2, Math.max(1, y(low) - y(high)));
    context.globalAlpha = 1;
    context.lineWidth = 1.6;
    context.beginPath();
    buckets.forEach(({ x: at, sum, count }, i) => {
      const isApart = !i || at - buckets[i - 1].x > this.gap(buckets);
      context[isApart ? "moveTo" : "lineTo"](at, y(sum / count));
    });
    context.stroke();
    if (buckets.length <= 60)
      for (const { x: at, sum, count } of buckets) {
        context.beginPath();
        context.arc(at, y(sum / count), 2.4, 0, 7);
        context.fill();
      }
  }

  // Wider than this is a pause, not a step: no line leads over it.
  gap(buckets) {
    this.usual ??= percentile(
      Float64Array.from(buckets.slice(1), (b, i) => b.x - buckets[i].x).sort(),
      0.9,
    );
    return Math.max(24, this.usual * 6);
  }

  hover(event) {
    if (!this.points.length || !this.x) return;
    const at = event.offsetX;
    let best = null;
    for (const point of this.points) {
      if (!best || Math.abs(this.x(point.ms) - at) < Math.abs(this.x(best.ms) - at)) best = point;
    }
    this.hovered = best;
    this.draw();
    showTip(event, `step ${best.step}`, [
      `${this.title}: ${this.text(best.value)}`,
      `at ${milliseconds(best.ms)}`,
    ]);
  }
}

// Times in ms, with lines at the percentiles; what is beyond the last bin is in it.
class Histogram {
  constructor(canvas, sub, times) {
    Object.assign(this, { canvas, sub });
    this.subText =
      sub.textContent = `time between tokens, ${times.length.toLocaleString("en")} of them`;
    this.times = Float64Array.from(times).sort();
    this.marks = [
      ["P50", 0.5],
      ["P90", 0.9],
      ["P99", 0.99],
    ].map(([name, part]) => [name, percentile(this.times, part)]);
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", hideTip);
  }

  bins(width) {
    const times = this.times,
      last = times[times.length - 1];
    const top = Math.min(last, percentile(times, 0.99) * 1.15);
    const low = Math.max(0, times[0] - (top - times[0]) * 0.08);
    const high = top > low ? top : low + Math.max(1e-3, low * 0.1);
    const number = Math.max(
      8,
      Math.min(56, Math.round(width / 9), Math.ceil(Math.sqrt(times.length) * 2.5)),
    );
    const counts = new Array(number).fill(0);
    for (const time of times)
      counts[Math.min(number - 1, Math.floor(((time - low) / (high - low)) * number))] += 1;
    return { low, high, counts, isOpen: last > high, width: (high - low) / number };
  }

  draw() {
    const { context, width, height } = contextOf(this.canvas);
    if (!this.times.length)
      return nothing(context, width, height, "fewer than two tokens: nothing to measure");
    const bins = (this.drawn = this.bins(width - MARGIN.left));
    if (bins.isOpen) this.sub.textContent = `${this.subText}; the red bar holds all beyond`;
    const most = Math.max(...bins.counts),
      top = 20;
    const x = (this.x = scaleOf(bins.low, bins.high, MARGIN.left, width - MARGIN.right));
    const y = scaleOf(0, most, height - MARGIN.bottom, top);
    const across = ticks(bins.low, bins.high, (width - MARGIN.left) / 90);
    const up = ticks(0, most, 3).values.filter(Number.isInteger);
    frame(
      context,
      width,
      height,
      { ticks: across.values, place: x, text: (ms) => `${+ms.toPrecision(6)} ms` },
      { ticks: up, place: y, text: String },
    );
    bins.counts.forEach((number, i) => {
      const left = x(bins.low + i * bins.width),
        right = x(bins.low + (i + 1) * bins.width);
      const isRest = bins.isOpen && i === bins.counts.length - 1;
      context.fillStyle = colour(isRest ? "stall" : "accent");
      context.fillRect(left + 0.5, y(number), Math.max(1, right - left - 1), y(0) - y(number));
    });
    this.drawMarks(context, x, height, width);
  }

  drawMarks(context, x, height, width) {
    context.strokeStyle = context.fillStyle = colour("ink");
    context.setLineDash([4, 3]);
    const labels = this.marks.map(([name, value]) => {
      const at = Math.min(x(value), width - MARGIN.right),
        text = `${name} ${milliseconds(value)}`;
      context.beginPath();
      context.moveTo(at, 16);
      context.lineTo(at, height - MARGIN.bottom);
      context.stroke();
      return { text, wide: context.measureText(text).width, at };
    });
    let limit = width;
    for (const label of labels.reverse()) {
      label.left = Math.min(label.at - label.wide / 2, limit - label.wide);
      limit = label.left - 8;
    }
    context.textAlign = "left";
    for (const { text, left } of labels) if (left > 0) context.fillText(text, left, 8);
    context.setLineDash([]);
  }

  hover(event) {
    if (!this.drawn || !this.x) return;
    const { low, width, counts, isOpen } = this.drawn;
    const bin = counts.findIndex(
      (_, i) =>
        event.offsetX < this.x(low + (i + 1) * width) && event.offsetX >= this.x(low + i * width),
    );
    if (bin < 0) return hideTip();
    const isRest = isOpen && bin === counts.length - 1;
    const to = isRest ? "and more" : `to ${milliseconds(low + (bin + 1) * width)}`;
    showTip(event, `${counts[bin]} of ${this.times.length} tokens`, [
      `${milliseconds(low + bin * width)} ${to}`,
    ]);
  }
}

function showTip(event, heading, lines) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(element("b", {}, heading), ...lines.map((line) => element("span", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left =
    event.clientX + 14 + width > window.innerWidth
      ? event.clientX - 14 - width
      : event.clientX + 14;
  const top =
    event.clientY + 16 + height > window.innerHeight
      ? event.clientY - 12 - height
      : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
