// The overview: every step of the run as a bar, its time split into what executors did, and the
// part that the lanes show.

function drawOverview(pipeline) {
  const { context, width, height } = contextOf(pipeline.overview);
  const floor = height - 8,
    place = scaleOf(0, Math.max(pipeline.span, MIN_SPAN), GUTTER, width);
  context.fillStyle = colour("band");
  context.fillRect(GUTTER, 0, width - GUTTER, height);
  drawStepBars(pipeline, context, place, width, floor);
  for (const mark of pipeline.marks) {
    if (mark.event === "phase") continue;
    context.fillStyle = colour((MARK_STYLE[mark.event] ?? ["soft"])[0]);
    const at = place(mark.t_ms / pipeline.tickMs);
    if (mark.event === "fault") context.fillRect(at - 1, 0, 2, height);
    context.fillRect(at - 1.5, floor + 2, 3, height - floor - 2);
  }
  drawWindow(pipeline, context, place, width, height);
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.fillText("step time", 0, 10);
  context.fillText(`0 – ${milliseconds(pipeline.capMs)}`, 0, 25);
}

function drawStepBars(pipeline, context, place, width, floor) {
  const { t, d, executors, compute, stall, wait } = pipeline.steps;
  const capTicks = pipeline.capMs / pipeline.tickMs;
  const columns = new Map();
  for (let i = 0; i < t.length; i++) {
    const left = place(t[i]),
      wide = place(t[i] + d[i]) - left;
    const whole = d[i] * executors[i];
    const split =
      whole && compute[i] >= 0
        ? [compute[i] / whole, Math.max(0, wait[i]) / whole, Math.max(0, stall[i]) / whole]
        : null;
    const key = wide >= 1 ? `s${i}` : Math.floor(left);
    const column = columns.get(key) ?? {
      left: wide >= 1 ? left : Math.floor(left),
      wide: Math.max(1, wide > 3 ? wide - 1 : wide),
      d: 0,
      split: [0, 0, 0],
      count: 0,
      split_count: 0,
    };
    column.d += d[i];
    column.count += 1;
    if (split) {
      split.forEach((part, at) => (column.split[at] += part));
      column.split_count += 1;
    }
    columns.set(key, column);
  }
  for (const { left, wide, d: sum, split, count: number, split_count: known } of columns.values()) {
    const high = Math.min(1, sum / number / capTicks) * (floor - 2);
    context.fillStyle = colour("group");
    context.fillRect(left, floor - high, wide, high);
    let bottom = floor;
    if (known)
      ["dense", "wait", "stall"].forEach((name, at) => {
        const part = Math.min(bottom - floor + high, (split[at] / known) * high);
        context.fillStyle = colour(name);
        context.fillRect(left, bottom - part, wide, part);
        bottom -= part;
      });
  }
}

function drawWindow(pipeline, context, place, width, height) {
  const from = place(pipeline.view.from),
    to = Math.max(from + 3, place(pipeline.view.to));
  context.globalAlpha = 0.4;
  context.fillStyle = colour("ground");
  context.fillRect(GUTTER, 0, Math.max(0, from - GUTTER), height);
  context.fillRect(to, 0, Math.max(0, width - to), height);
  context.globalAlpha = 1;
  context.strokeStyle = colour("accent");
  context.lineWidth = 2;
  context.strokeRect(from, 1, Math.max(2, to - from), height - 2);
}

// Dragging inside the window moves it, elsewhere it chooses a new one; a click brings it there.
function listenToOverview(pipeline) {
  const canvas = pipeline.overview;
  const tickAt = (event) => {
    const part = (event.offsetX - GUTTER) / (canvas.clientWidth - GUTTER);
    return Math.max(0, Math.min(1, part)) * Math.max(pipeline.span, MIN_SPAN);
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    const at = tickAt(event),
      { from, to } = pipeline.view;
    drag = {
      at,
      from,
      to,
      isInside: at >= from && at <= to && to - from < pipeline.span * 0.98,
      isMoved: false,
    };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const at = tickAt(event);
    drag.isMoved ||= Math.abs(at - drag.at) > pipeline.span * 0.002;
    if (drag.isInside) pipeline.show(drag.from + at - drag.at, drag.to + at - drag.at);
    else if (drag.isMoved) pipeline.show(Math.min(at, drag.at), Math.max(at, drag.at));
  });
  canvas.addEventListener("pointerup", () => {
    if (drag && !drag.isMoved && !drag.isInside) {
      const half = Math.min((drag.to - drag.from) / 2, pipeline.usualStep() * 2);
      pipeline.show(drag.at - half, drag.at + half);
    }
    drag = null;
  });
  canvas.addEventListener("keydown", (event) => onKey(pipeline, event));
}
