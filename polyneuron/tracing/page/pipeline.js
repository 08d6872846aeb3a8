// The pipeline: which part of the run is seen, the whole above it, and the lanes of the part.

const MIN_SPAN = 20; // ticks

class Pipeline {
  constructor(page, onView) {
    Object.assign(this, page); // head, tables, tickMs, span, steps, marks
    this.overview = document.getElementById("overview");
    this.canvas = document.getElementById("lanes");
    this.onView = onView;
    this.kindCategory = categories(this.head.kinds, false);
    this.stageCategory = categories(this.head.stages, true);
    this.lanes = this.layOut();
    this.hovered = null;
    const last = this.lanes[this.lanes.length - 1];
    this.canvas.style.height = `${last.top + last.height + 20}px`;
    this.view = this.firstView();
    listen(this);
  }

  layOut() {
    const lanes = [{ kind: "steps", name: "steps", top: AXIS, height: STEP_HEIGHT }];
    let top = AXIS + STEP_HEIGHT + LANE_GAP + 1;
    this.head.executors.forEach((name, index) => {
      const ops = this.records(`ops${index}`),
        clusters = this.records(`clusters${index}`);
      lanes.push({
        kind: "executor",
        name,
        top,
        height: LANE_HEIGHT,
        ops,
        clusters,
        waits: waitsBefore(ops),
      });
      top += LANE_HEIGHT + LANE_GAP;
    });
    const reads = this.records("reads");
    if (reads.t.length) {
      const rows = reads.lane.reduce((most, lane) => Math.max(most, lane), 0) + 1;
      const rowHeight = Math.min(9, 96 / rows);
      lanes.push({
        kind: "reads",
        name: "flash",
        top,
        height: rows * rowHeight,
        rowHeight,
        rows,
        reads,
        byLane: splitByLane(reads, rows),
      });
    }
    return lanes;
  }

  records(name) {
    const columns = this.tables[name] ?? {};
    const found = {
      ...columns,
      t: columns.t ?? new Float64Array(0),
      d: columns.d ?? new Float64Array(0),
    };
    return { ...found, longest: found.d.reduce((most, d) => Math.max(most, d), 0) };
  }

  // Two decode steps that can be seen in detail; all of a short run.
  firstView() {
    const { t, d, detail, phase } = this.steps;
    const decode = this.head.phases.indexOf("decode");
    const chosen = [];
    for (let i = 0; i < t.length && chosen.length < 6; i++)
      if (detail[i] && phase[i] === decode) chosen.push(i);
    if (t.length <= 4 || !chosen.length) return { from: 0, to: Math.max(this.span, MIN_SPAN) };
    const first = chosen[Math.min(2, chosen.length - 1)],
      end = Math.min(first + 1, t.length - 1);
    const margin = (t[end] + d[end] - t[first]) * 0.02;
    return { from: Math.max(0, t[first] - margin), to: t[end] + d[end] + margin };
  }

  show(from, to) {
    const most = Math.max(this.span, MIN_SPAN),
      wide = Math.min(most, Math.max(MIN_SPAN, to - from));
    const middle = (from + to) / 2;
    const begin = Math.max(0, Math.min(most - wide, middle - wide / 2));
    this.view = { from: begin, to: begin + wide };
    this.draw();
  }

  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view,
      most = Math.max(this.span, MIN_SPAN);
    const wide = Math.min(most, Math.max(MIN_SPAN, (to - from) * factor));
    const left = at - ((at - from) / (to - from)) * wide;
    const begin = Math.max(0, Math.min(most - wide, left));
    this.view = { from: begin, to: begin + wide };
    this.draw();
  }

  move(part) {
    const by = (this.view.to - this.view.from) * part;
    this.show(this.view.from + by, this.view.to + by);
  }

  showStep(index) {
    const { t, d } = this.steps;
    if (!t.length) return;
    const i = Math.max(0, Math.min(t.length - 1, index)),
      margin = Math.max(d[i] * 0.04, 2);
    this.show(t[i] - margin, t[i] + d[i] + margin);
  }

  stepAt(tick) {
    return Math.max(0, lowerBound(this.steps.t, tick + 1) - 1);
  }

  nextStep(direction) {
    const middle = (this.view.from + this.view.to) / 2,
      { t, d } = this.steps;
    const at = this.stepAt(middle),
      isOne = d[at] > 0 && this.view.to - this.view.from < d[at] * 1.5;
    this.showStep(isOne || direction < 0 ? at + direction : at + (t[at] < this.view.from ? 1 : 0));
  }

  showMoment(ms) {
    const at = ms / this.tickMs,
      half = Math.min(this.span / 2, this.usualStep() * 4);
    this.show(at - half, at + half);
  }

  usualStep() {
    return this.usualTicks || this.span / 10 || MIN_SPAN;
  }

  showNextFault() {
    const faults = this.marks.filter((mark) => mark.event === "fault");
    const middle = ((this.view.from + this.view.to) / 2) * this.tickMs;
    const next = faults.find((mark) => mark.t_ms > middle + 1e-6) ?? faults[0];
    if (next) this.showMoment(next.t_ms);
  }

  x(tick) {
    const { from, to } = this.view;
    return GUTTER + ((tick - from) / (to - from)) * (this.canvas.clientWidth - GUTTER);
  }

  tick(x) {
    const { from, to } = this.view;
    return from + ((x - GUTTER) / (this.canvas.clientWidth - GUTTER)) * (to - from);
  }

  draw() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      this.drawNow();
    });
  }

  drawNow() {
    drawOverview(this);
    const { context, width, height } = contextOf(this.canvas);
    const painter = new RecordPainter(context, this.view, GUTTER, width - GUTTER);
    for (const lane of this.lanes) {
      context.fillStyle = colour("band");
      context.fillRect(GUTTER, lane.top, width - GUTTER, lane.height);
    }
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    drawAxis(context, this.view, GUTTER, width - GUTTER, this.tickMs);
    this.drawSteps(context);
    for (const lane of this.lanes) {
      if (lane.kind === "executor") this.drawExecutor(painter, lane);
      if (lane.kind === "reads") this.drawReads(painter, lane);
    }
    drawMarks(context, this.marks, this.view, GUTTER, width - GUTTER, height, this.tickMs);
    this.drawHovered(context);
    context.restore();
    this.drawNames(context);
    this.onView(this.view);
  }

  drawNames(context) {
    context.textAlign = "left";
    for (const { name, top, height } of this.lanes) {
      context.fillStyle = colour("ink");
      context.fillText(
        shortened(context, name, GUTTER - 10),
        0,
        top + Math.min(height, LANE_HEIGHT) / 2 + 1,
      );
    }
  }

  drawSteps(context) {
    const { t, d, step, detail } = this.steps,
      lane = this.lanes[0];
    const bottom = this.lanes[this.lanes.length - 1],
      down = bottom.top + bottom.height - lane.top - lane.height;
    const stripes = hatch(context, colour("band2"));
    let last = -1;
    for (let i = this.stepAt(this.view.from); i < t.length && t[i] < this.view.to; i++) {
      const left = Math.max(GUTTER - 2, this.x(t[i])),
        wide = this.x(t[i] + d[i]) - left;
      if (left + wide < GUTTER) continue;
      if (!detail[i]) {
        context.fillStyle = stripes;
        context.fillRect(left, lane.top + lane.height + 1, Math.max(1, wide), down);
      }
      if (wide < 2 && Math.floor(left) === last) continue;
      last = Math.floor(left);
      context.fillStyle = colour(i % 2 ? "band2" : "group");
      context.fillRect(left, lane.top, Math.max(1, wide - 1), lane.height);
      this.labelStep(context, i, left, wide, lane);
    }
  }

  labelStep(context, i, left, wide, lane) {
    const { step, d, phase } = this.steps;
    const at = Math.max(left, GUTTER) + 5,
      room = left + wide - at;
    if (room < 26) return;
    const name = `${this.head.phases[phase[i]]} ${step[i]}`;
    const texts = [`${name} · ${milliseconds(d[i] * this.tickMs)}`, name, String(step[i])];
    const text = texts.find((candidate) => context.measureText(candidate).width < room - 4);
    context.fillStyle = colour("ink");
    context.textAlign = "left";
    if (text) context.fillText(text, at, lane.top + lane.height / 2 + 1);
  }

  drawExecutor(painter, lane) {
    const { top, height, ops, clusters, waits } = lane;
    painter.paint(
      waits,
      (i) => (waits.isFlash[i] ? NUMBER_OF.stall : NUMBER_OF.wait),
      top + height * 0.34,
      height * 0.32,
    );
    painter.paint(ops, (i) => this.kindCategory[ops.kind[i]], top, height);
    painter.paint(clusters, (i) => this.stageCategory[clusters.stage[i]], top + 7, height - 7);
    this.hatchStalls(painter.context, lane);
  }

  // A wait for flash differs by more than its colour.
  hatchStalls(context, { top, height, clusters }) {
    const stripes = hatch(context, colour("panel")),
      { from, to } = this.view;
    if (this.x(clusters.longest) - this.x(0) < 4) return;
    context.fillStyle = stripes;
    for (
      let i = lowerBound(clusters.t, from - clusters.longest);
      i < clusters.t.length && clusters.t[i] < to;
      i++
    ) {
      if (this.stageCategory[clusters.stage[i]] !== NUMBER_OF.stall) continue;
      const left = this.x(clusters.t[i]),
        wide = this.x(clusters.t[i] + clusters.d[i]) - left;
      if (wide > 4) context.fillRect(left, top + 7, wide, height - 7);
    }
  }

  drawReads(painter, { top, rowHeight, byLane }) {
    const gap = rowHeight > 4 ? 1 : 0;
    byLane.forEach((reads, row) => {
      painter.paint(
        reads,
        (i) => (reads.status[i] ? NUMBER_OF.stall : NUMBER_OF.read),
        top + row * rowHeight,
        rowHeight - gap,
      );
    });
  }

  drawHovered(context) {
    const hit = this.hovered;
    if (!hit) return;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    const left = this.x(hit.t),
      right = this.x(hit.t + hit.d);
    context.strokeRect(left, hit.top + 0.5, Math.max(2, right - left), hit.height - 1);
    if (!hit.use) return;
    context.beginPath();
    context.moveTo(right, hit.top + hit.height / 2);
    context.lineTo(this.x(hit.use.t), hit.use.y);
    context.stroke();
    context.beginPath();
    context.arc(this.x(hit.use.t), hit.use.y, 3.5, 0, 7);
    context.fillStyle = colour("ink");
    context.fill();
  }
}

function shortened(context, text, room) {
  let shown = text;
  while (shown.length > 1 && context.measureText(shown).width > room)
    shown = `${shown.slice(0, -2)}…`;
  return shown;
}

// The time each op waited before it began, as records; never over the op before it. The layer that
// flash owed is waited for last.
function waitsBefore(ops) {
  const t = [],
    d = [],
    isFlash = [];
  let free = 0;
  const add = (from, to, flash) => {
    const begin = Math.max(free, from);
    if (to > begin) {
      t.push(begin);
      d.push(to - begin);
      isFlash.push(flash);
    }
  };
  for (let i = 0; i < ops.t.length; i++) {
    const turn = ops.t[i] - ops.flash[i];
    add(ops.t[i] - ops.wait[i], turn, 0);
    add(turn, ops.t[i], 1);
    free = Math.max(free, ops.t[i] + ops.d[i]);
  }
  const longest = d.reduce((most, wait) => Math.max(most, wait), 0);
  return { t: Float64Array.from(t), d: Float64Array.from(d), isFlash, longest };
}

function splitByLane(reads, rows) {
  const indices = Array.from({ length: rows }, () => []);
  reads.lane.forEach((lane, i) => indices[lane].push(i));
  return indices.map((of) => ({
    index: of,
    t: Float64Array.from(of, (i) => reads.t[i]),
    d: Float64Array.from(of, (i) => reads.d[i]),
    status: of.map((i) => reads.status[i]),
    longest: of.reduce((most, i) => Math.max(most, reads.d[i]), 0),
  }));
}
