// Draws the lanes: what begins and ends within less than a pixel is drawn as the share it takes.

const GUTTER = 92,
  AXIS = 22,
  STEP_HEIGHT = 20,
  LANE_HEIGHT = 26,
  LANE_GAP = 5;
const BLOCK = 64; // records
const BIN = 3; // pixels over which short records are summed up

const CATEGORIES = [
  ["dense", "attention, norms, matrices"],
  ["hot", "feed forward, dense"],
  ["group", "neuron clusters"],
  ["predict", "predict"],
  ["gate", "gate"],
  ["updown", "up and down"],
  ["stall", "waits for flash"],
  ["wait", "waits for others"],
  ["read", "read from flash"],
  ["other", "other"],
];
const CATEGORY_OF = {
  embed: "dense",
  norm: "dense",
  matmul: "dense",
  rope_kv: "dense",
  attention: "dense",
  quantize: "dense",
  merge: "dense",
  feed_forward: "hot",
  clusters: "group",
  late_clusters: "group",
  rows_up: "gate",
  rows_down: "updown",
  predict: "predict",
  await_rows: "stall",
  pred: "predict",
  gc: "gate",
  udc: "updown",
};
const NUMBER_OF = Object.fromEntries(CATEGORIES.map(([name], i) => [name, i]));

function categories(words, isStage) {
  return words.map((word) => {
    const name = isStage && word === "wait" ? "stall" : CATEGORY_OF[word];
    return NUMBER_OF[
      Object.hasOwn(CATEGORY_OF, word) || (isStage && word === "wait") ? name : "other"
    ];
  });
}

const hatches = new Map();

function hatch(context, ink) {
  if (hatches.has(ink)) return hatches.get(ink);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const on = tile.getContext("2d");
  on.strokeStyle = ink;
  on.lineWidth = 1;
  on.beginPath();
  on.moveTo(-1, 7);
  on.lineTo(7, -1);
  on.stroke();
  hatches.set(ink, context.createPattern(tile, "repeat"));
  return hatches.get(ink);
}

// Sums of every so many records on end, made once: the whole of a long run is drawn from them.
function blocksOf(records, categoryOf) {
  if (records.blocks) return records.blocks;
  const { t, d } = records,
    number = Math.ceil(t.length / BLOCK);
  const end = new Float64Array(number),
    sums = new Float64Array(number * CATEGORIES.length);
  for (let i = 0; i < t.length; i++) {
    const block = Math.floor(i / BLOCK);
    end[block] = Math.max(end[block], t[i] + d[i]);
    sums[block * CATEGORIES.length + categoryOf(i)] += d[i];
  }
  return (records.blocks = { end, sums });
}

// Draws records (starts t, durations d, all in ticks) that are seen between from and to.
// `categoryOf(i)` is a category's number; `row(i)` where the record lies, null: over the lane.
class RecordPainter {
  constructor(context, view, left, width) {
    Object.assign(this, { context, view, left, width });
    this.scale = width / (view.to - view.from);
    this.bins = new Float32Array(Math.ceil(width / BIN + 1) * CATEGORIES.length);
  }

  paint(records, categoryOf, top, height, minimum = 0.8) {
    const { from, to } = this.view,
      { t, d } = records;
    this.bins.fill(0);
    let isBinned = false;
    const drawn = CATEGORIES.map(() => []);
    const blocks = blocksOf(records, categoryOf);
    for (let i = lowerBound(t, from - records.longest); i < t.length && t[i] < to; i++) {
      const block = i % BLOCK ? -1 : i / BLOCK;
      if (block >= 0 && (blocks.end[block] - t[i]) * this.scale < BIN / 2) {
        isBinned = true;
        this.addBlock(blocks, block, (t[i] - from) * this.scale);
        i += BLOCK - 1;
        continue;
      }
      const begin = (t[i] - from) * this.scale,
        end = begin + d[i] * this.scale;
      if (end < 0) continue;
      if (end - begin >= minimum)
        drawn[categoryOf(i)].push(Math.max(0, begin), Math.min(this.width, end));
      else {
        isBinned = true;
        const bin = Math.max(0, Math.floor(begin / BIN)) * CATEGORIES.length + categoryOf(i);
        if (bin < this.bins.length) this.bins[bin] += (end - begin) / BIN;
      }
    }
    if (isBinned) this.paintBins(top, height);
    drawn.forEach((spans, category) => {
      this.context.fillStyle = colour(CATEGORIES[category][0]);
      for (let i = 0; i < spans.length; i += 2) {
        const wide = spans[i + 1] - spans[i];
        this.context.fillRect(this.left + spans[i], top, wide > 3 ? wide - 0.6 : wide, height);
      }
    });
  }

  addBlock({ sums }, block, begin) {
    const number = CATEGORIES.length,
      bin = Math.max(0, Math.floor(begin / BIN)) * number;
    for (let category = 0; category < number && bin + category < this.bins.length; category++)
      this.bins[bin + category] += (sums[block * number + category] * this.scale) / BIN;
  }

  paintBins(top, height) {
    const number = CATEGORIES.length;
    for (let pixel = 0; pixel * number < this.bins.length; pixel++) {
      let bottom = top + height;
      for (let category = 0; category < number; category++) {
        const part = this.bins[pixel * number + category];
        if (!part) continue;
        const high = Math.min(bottom - top, Math.max(0.5, part * height));
        this.context.fillStyle = colour(CATEGORIES[category][0]);
        this.context.fillRect(this.left + pixel * BIN, bottom - high, BIN, high);
        bottom -= high;
      }
    }
  }
}

function drawAxis(context, view, left, width, tickMs) {
  const { step, values } = ticks(view.from * tickMs, view.to * tickMs, width / 120);
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.strokeStyle = colour("grid");
  for (const ms of values) {
    const at = Math.round(left + ((ms / tickMs - view.from) / (view.to - view.from)) * width) + 0.5;
    context.beginPath();
    context.moveTo(at, 4);
    context.lineTo(at, context.canvas.clientHeight);
    context.stroke();
    context.fillText(moment(ms, step), at + 4, 10);
  }
}

const MARK_STYLE = {
  fault: ["bad", "▲"],
  restart: ["good", "↻"],
  batch: ["accent", "●"],
  graph: ["hot", "◆"],
  plan: ["updown", "■"],
  phase: ["soft", "▸"],
};

function markText(mark) {
  switch (mark.event) {
    case "fault":
      return `${mark.kind} ${mark.target}`;
    case "restart":
      return `restart ${mark.target}`;
    case "batch":
      return `batch of ${mark.sequences}, hot ${share(mark.hot_share)}`;
    case "graph":
      return mark.previous ? `${mark.previous} → ${mark.graph}` : mark.graph;
    case "plan":
      return `${mark.what}: ${count(mark.cold_slots)} slots, ${bytes(mark.memory_bytes)}`;
    default:
      return mark.phase ?? mark.event;
  }
}

// Lines through all lanes at switches and faults; names where there is room.
function drawMarks(context, marks, view, left, width, height, tickMs) {
  let free = -Infinity;
  const inView = marks.filter(
    (mark) => mark.t_ms / tickMs >= view.from && mark.t_ms / tickMs <= view.to,
  );
  const rank = (mark) =>
    ["phase", "graph", "batch", "plan", "restart", "fault"].indexOf(mark.event);
  const isCrowded = inView.length > width / 8;
  for (const mark of [...inView].sort((a, b) => rank(a) - rank(b))) {
    if (isCrowded && rank(mark) < 4) continue;
    const at =
      Math.round(left + ((mark.t_ms / tickMs - view.from) / (view.to - view.from)) * width) + 0.5;
    context.strokeStyle = colour((MARK_STYLE[mark.event] ?? ["soft"])[0]);
    context.lineWidth = mark.event === "fault" ? 2 : 1;
    context.setLineDash(mark.event === "fault" ? [] : [3, 3]);
    context.beginPath();
    context.moveTo(at, AXIS - 4);
    context.lineTo(at, height - 16);
    context.stroke();
  }
  context.setLineDash([]);
  context.textAlign = "left";
  for (const [name, group] of grouped(inView, (mark) => mark.t_ms)) {
    const at = left + ((name / tickMs - view.from) / (view.to - view.from)) * width;
    const best = group.reduce((a, b) => (rank(b) > rank(a) ? b : a));
    const [ink, glyph] = MARK_STYLE[best.event] ?? ["soft", "▸"];
    const more = group.length > 1 ? ` +${group.length - 1}` : "";
    const text = `${glyph} ${markText(best)}${more}`,
      wide = context.measureText(text).width;
    if (at < free) continue;
    const x = Math.min(at + 1, left + width - wide);
    context.fillStyle = colour(ink);
    context.fillText(text, x, height - 7);
    free = x + wide + 12;
  }
}

function grouped(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}
