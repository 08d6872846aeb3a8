// Wheel, pointer and keys over the lanes, and what lies under the pointer.

function listen(pipeline) {
  listenToOverview(pipeline);
  const { canvas } = pipeline;
  canvas.addEventListener("wheel", (event) => onWheel(pipeline, event), { passive: false });
  canvas.addEventListener("keydown", (event) => onKey(pipeline, event));
  canvas.addEventListener("pointerleave", () => setHovered(pipeline, null));
  canvas.addEventListener("dblclick", (event) =>
    pipeline.showStep(pipeline.stepAt(pipeline.tick(event.offsetX))),
  );
  listenToDrags(pipeline);
}

function onWheel(pipeline, event) {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    pipeline.move(((event.deltaX || event.deltaY) * unit) / pipeline.canvas.clientWidth);
  } else {
    const factor = Math.exp(Math.max(-80, Math.min(80, event.deltaY * unit)) * 0.004);
    pipeline.zoom(factor, pipeline.tick(Math.max(GUTTER, event.offsetX)));
  }
}

const KEYS = {
  ArrowLeft: (p) => p.move(-0.15),
  ArrowRight: (p) => p.move(0.15),
  ArrowUp: (p) => p.zoom(1 / 1.5),
  ArrowDown: (p) => p.zoom(1.5),
  "+": (p) => p.zoom(1 / 1.5),
  "=": (p) => p.zoom(1 / 1.5),
  "-": (p) => p.zoom(1.5),
  "[": (p) => p.nextStep(-1),
  "]": (p) => p.nextStep(1),
  PageUp: (p) => p.nextStep(-1),
  PageDown: (p) => p.nextStep(1),
  Home: (p) => p.showStep(0),
  End: (p) => p.showStep(Infinity),
  0: (p) => p.show(0, p.span),
  f: (p) => p.showNextFault(),
};

function onKey(pipeline, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key](pipeline);
}

// A drag moves the view; with shift it chooses a new one.
function listenToDrags(pipeline) {
  const { canvas } = pipeline;
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || (event.pointerType === "touch" && !event.isPrimary)) return;
    drag = { x: event.offsetX, ...pipeline.view, isChoosing: event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("is-moving");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return setHovered(pipeline, hitAt(pipeline, event.offsetX, event.offsetY), event);
    hideTip();
    if (drag.isChoosing) return undefined;
    const by = ((drag.x - event.offsetX) / (canvas.clientWidth - GUTTER)) * (drag.to - drag.from);
    return pipeline.show(drag.from + by, drag.to + by);
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("is-moving");
    if (drag && drag.isChoosing && Math.abs(event.offsetX - drag.x) > 4) {
      const [from, to] = [pipeline.tick(drag.x), pipeline.tick(event.offsetX)].sort(
        (a, b) => a - b,
      );
      pipeline.show(from, to);
    }
    drag = null;
  });
}

function setHovered(pipeline, hit, event) {
  const isNew = hit?.key !== pipeline.hovered?.key;
  pipeline.hovered = hit;
  if (hit) showTip(event, hit.heading, hit.lines);
  else hideTip();
  if (isNew) pipeline.draw();
}

function hitAt(pipeline, x, y) {
  if (x < GUTTER) return null;
  const tick = pipeline.tick(x),
    slack = ((pipeline.view.to - pipeline.view.from) / pipeline.canvas.clientWidth) * 2;
  const lane = pipeline.lanes.find(({ top, height }) => y >= top && y < top + height);
  if (!lane) return null;
  if (lane.kind === "steps") return hitStep(pipeline, lane, tick);
  if (lane.kind === "executor") return hitExecutor(pipeline, lane, tick, slack, y);
  return hitRead(pipeline, lane, tick, slack, y);
}

// The record around a tick, or the nearest within the slack; the later begun first.
function recordAt({ t, d, longest }, tick, slack) {
  let best = -1;
  for (let i = lowerBound(t, tick - longest - slack); i < t.length && t[i] <= tick + slack; i++) {
    if (t[i] + d[i] + slack >= tick && (best < 0 || t[i] <= tick)) best = i;
  }
  return best;
}

function hitStep(pipeline, lane, tick) {
  const { steps, head, tickMs } = pipeline,
    i = pipeline.stepAt(tick);
  if (!steps.t.length || tick > steps.t[i] + steps.d[i] || tick < steps.t[i]) return null;
  const took = (ticks) => milliseconds(ticks * tickMs);
  const measured = (name) => (steps[name][i] < 0 ? null : steps[name][i]);
  const part = (name) => {
    const whole = steps.d[i] * steps.executors[i];
    return measured(name) === null || !whole ? null : steps[name][i] / whole;
  };
  const used =
    measured("hits") === null || measured("misses") === null ? 0 : steps.hits[i] + steps.misses[i];
  return {
    key: `step${i}`,
    t: steps.t[i],
    d: steps.d[i],
    top: lane.top,
    height: lane.height,
    heading: `${head.phases[steps.phase[i]]} step ${steps.step[i]} · ${took(steps.d[i])}`,
    lines: [
      `${head.graphs[steps.graph[i]]}, ${steps.tokens[i]} tokens, ${steps.sequences[i]} sequences`,
      `compute ${share(part("compute"))}, waits for flash ${share(part("stall"))}`,
      `waits for others ${share(part("wait"))}`,
      `hit rate ${rate(used ? steps.hits[i] / used : null)}, ${count(measured("misses"))} misses`,
      `${count(measured("reads"))} reads, ${bytes(measured("bytes"))}`,
      ...(steps.detail[i] ? [] : ["without detail"]),
    ],
  };
}

function hitExecutor(pipeline, lane, tick, slack, y) {
  const { head, tickMs } = pipeline,
    { ops, clusters, waits, top, height } = lane;
  const box = { top, height };
  const cluster = recordAt(clusters, tick, slack);
  if (cluster >= 0 && y > top + 7) {
    const c = clusters,
      i = cluster;
    return {
      ...box,
      key: `${lane.name}c${i}`,
      t: c.t[i],
      d: c.d[i],
      top: top + 7,
      height: height - 7,
      heading: `${head.stages[c.stage[i]]} · ${milliseconds(c.d[i] * tickMs)}`,
      lines: [
        `layer ${c.layer[i]}, cluster ${c.cluster[i]}, step ${c.step[i]}`,
        `${count(c.neurons[i])} neurons, ${count(c.misses[i])} misses`,
      ],
    };
  }
  const w = recordAt(waits, tick, 0),
    i = w < 0 ? recordAt(ops, tick, slack) : -1;
  if (i >= 0 && ops.t[i] <= tick + slack && ops.t[i] + ops.d[i] >= tick - slack) {
    const of = ops.layer[i] < 0 ? "" : `layer ${ops.layer[i]}, `;
    return {
      ...box,
      key: `${lane.name}o${i}`,
      t: ops.t[i],
      d: ops.d[i],
      heading: `${head.kinds[ops.kind[i]]} · ${milliseconds(ops.d[i] * tickMs)}`,
      lines: [
        `${of}op ${ops.op[i]} of step ${ops.step[i]}`,
        `${ops.units[i]} units, waited ${milliseconds(ops.wait[i] * tickMs)} before`,
      ],
    };
  }
  if (w < 0) return null;
  const whom = waits.isFlash[w] ? "flash" : "others";
  return {
    ...box,
    key: `${lane.name}w${w}`,
    t: waits.t[w],
    d: waits.d[w],
    heading: `waits for ${whom} · ${milliseconds(waits.d[w] * tickMs)}`,
    lines: [],
  };
}

function hitRead(pipeline, lane, tick, slack, y) {
  const { tickMs, head } = pipeline,
    { reads, rowHeight, top } = lane;
  const row = Math.min(lane.rows - 1, Math.floor((y - top) / rowHeight));
  const found = recordAt(lane.byLane[row], tick, slack);
  if (found < 0) return null;
  const i = lane.byLane[row].index[found],
    user = reads.executor[i];
  const userLane = user < 0 ? null : pipeline.lanes[1 + user];
  const name = user < 0 ? null : head.executors[user];
  const what = reads.neuron[i] < 0 ? "a run of neurons" : `neuron ${reads.neuron[i]}`;
  const lines = [
    `layer ${reads.layer[i]}, ${what}`,
    reads.step[i] < 0 ? "step not known" : `step ${reads.step[i]}`,
  ];
  if (name) lines.push(reads.waited[i] ? `${name} was waiting for it` : `in time for ${name}`);
  if (reads.status[i]) lines.push(`failed: errno ${Math.abs(reads.status[i])}`);
  return {
    key: `r${i}`,
    t: reads.t[i],
    d: reads.d[i],
    top: top + row * rowHeight,
    height: rowHeight,
    heading: `read of ${bytes(reads.bytes[i])} · ${milliseconds(reads.d[i] * tickMs)}`,
    lines,
    use: userLane && { t: reads.use_t[i], y: userLane.top + userLane.height / 2 },
  };
}
