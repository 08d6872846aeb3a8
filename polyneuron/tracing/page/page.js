// Puts the page together: facts, tiles, charts, tables, and the pipeline.

const byId = (id) => document.getElementById(id);

function fillFacts(run) {
  byId("model").textContent = run?.model || "unknown model";
  if (!run) return;
  const facts = [
    [run.clock === "model" ? "model time: simulated" : null, null],
    ["policy", run.policy === "engine" ? null : run.policy],
    ["mode", run.mode],
    ["kernels", run.isa],
    ["CPU workers", run.workers],
    ["NPU threads", run.npu_threads || null],
    ["layers", run.layers],
    ["clusters a layer", run.clusters || null],
    ["memory", run.memory_bytes ? bytes(run.memory_bytes) : null],
    ["arena", run.arena_bytes ? bytes(run.arena_bytes) : null],
    ["cold slots", run.cold_slots ? run.cold_slots.toLocaleString("en") : null],
  ];
  for (const [name, value] of facts) {
    if (name && name.startsWith("model time"))
      byId("facts").append(element("li", { class: "modelled" }, name));
    else if (known(value) && value !== "")
      byId("facts").append(element("li", {}, `${name} `, element("b", {}, value)));
  }
}

function fillTiles(figures, tbt) {
  const decode = figures.decode,
    token = decode?.token,
    first = figures.requests.map((r) => r.ttft_ms).filter(known);
  const sorted = Float64Array.from(tbt).sort(),
    faults = figures.faults.length;
  const prompt = figures.requests[0]?.prompt_tokens;
  const tile = (label, value, more, isBad) => {
    const [, number, unit] = /^([\d.,–]+)\s*(.*)$/.exec(value) ?? [null, value, ""];
    byId("tiles").append(
      element(
        "li",
        isBad ? { class: "is-bad" } : {},
        element("div", { class: "label" }, label),
        element("div", { class: "value" }, number, element("small", {}, unit)),
        element("div", { class: "more" }, more),
      ),
    );
  };
  tile(
    "Time to first token",
    milliseconds(percentile(Float64Array.from(first).sort(), 0.5)),
    first.length > 1
      ? `median of ${first.length} requests`
      : prompt === undefined
        ? "no request"
        : `${several(prompt, "token")} of prompt`,
  );
  tile(
    "Decode",
    known(decode?.tokens_per_second) ? `${digits(decode.tokens_per_second)} tokens/s` : NONE,
    `${(decode?.tokens ?? 0).toLocaleString("en")} in ${several(decode?.steps ?? 0, "step")}`,
  );
  tile(
    "Between tokens, P50",
    milliseconds(percentile(sorted, 0.5)),
    `P90 ${plainMs(percentile(sorted, 0.9))} · P99 ${plainMs(percentile(sorted, 0.99))}`,
  );
  tile(
    "Flash on critical path",
    share(decode?.stall_share),
    `${milliseconds(token?.stall_ms.mean)} a token`,
  );
  tile("Hit rate", rate(decode?.hit_rate), `miss rate P99 ${rate(decode?.miss_rate.p99)}`);
  tile("Read a token", bytes(token?.bytes.mean), `${count(token?.reads.mean)} reads`);
  tile("Faults", String(faults), several(figures.restarts.length, "restart"), faults > 0);
}

// Without its unit where that is ms, to be short.
function plainMs(ms) {
  return milliseconds(ms).replace(/ ms$/, "");
}

function fillNotice({ figures, records, records_recorded: recorded }) {
  const said = [];
  if (figures.cut) said.push("The timeline was cut short: this is what came before.");
  if (figures.lost_records)
    said.push(
      `${figures.lost_records.toLocaleString("en")} records did not fit their rings and are lost.`,
    );
  if (records < recorded)
    said.push(
      `The page holds ${count(records)} of ${count(recorded)} records: those of every n-th step.`,
    );
  byId("notice").textContent = said.join(" ");
  byId("notice").hidden = !said.length;
}

function fillLegend(pipeline) {
  const isThere = new Set([...pipeline.kindCategory, ...pipeline.stageCategory]);
  for (const { waits } of pipeline.lanes)
    for (const flash of new Set(waits?.isFlash))
      isThere.add(flash ? NUMBER_OF.stall : NUMBER_OF.wait);
  if (pipeline.lanes.some((lane) => lane.kind === "reads")) isThere.add(NUMBER_OF.read);
  CATEGORIES.forEach(([name, label], number) => {
    if (!isThere.has(number)) return;
    const box = element("i", { class: name === "stall" ? "hatched" : "" });
    box.style.backgroundColor = `var(--${name})`;
    byId("legend").append(element("li", {}, box, label));
  });
}

function fillTables(figures, pipeline) {
  const none = (text) => element("p", { class: "none" }, text);
  const requests = figures.requests.map((r) => [
    r.request,
    r.reason ?? r.state ?? NONE,
    r.prompt_tokens,
    r.tokens,
    milliseconds(r.ttft_ms),
    ...["mean", "p50", "p90", "p99"].map((name) => milliseconds(r.tbt_ms[name])),
  ]);
  byId("requests").append(
    requests.length
      ? table(
          [
            ["request"],
            ["end", true],
            ["prompt"],
            ["tokens"],
            ["first"],
            ["mean"],
            ["P50"],
            ["P90"],
            ["P99"],
          ],
          requests,
        )
      : none("No request was made."),
  );
  byId("costs").append(costTable(figures) ?? none("No token was generated."));
  const executors = figures.executors.map((e) => [
    e.executor,
    shareBar(e),
    share(e.busy_share),
    share(e.stall_share),
    share(e.wait_share),
  ]);
  byId("executors").append(
    executors.length
      ? table([["executor"], ["", true], ["busy"], ["flash"], ["others"]], executors)
      : none("No step has detail: not measured."),
  );
  byId("marks").append(markTable(pipeline) ?? none("Nothing changed and nothing failed."));
}

function costTable(figures) {
  const phases = [
    ["decode", figures.decode],
    ["prefill", figures.prefill],
  ].filter(([, phase]) => phase);
  const rows = phases.flatMap(([name, { token, step_ms: step }]) =>
    [
      [`${name}: step`, milliseconds, step],
      [`${name}: compute`, milliseconds, token.compute_ms],
      [`${name}: waits for flash`, milliseconds, token.stall_ms],
      [`${name}: waits for others`, milliseconds, token.wait_ms],
      [`${name}: neurons needed`, count, token.needed],
      [`${name}: misses`, count, token.misses],
      [`${name}: bytes`, bytes, token.bytes],
      [`${name}: reads`, count, token.reads],
    ].map(([label, text, values]) => [
      label,
      ...["mean", "p50", "p90", "p99"].map((key) => text(values[key])),
    ]),
  );
  return rows.length
    ? table([["a token (of all executors)"], ["mean"], ["P50"], ["P90"], ["P99"]], rows)
    : null;
}

function shareBar({ busy_share: busy, stall_share: stall, wait_share: wait }) {
  const bar = element("div", { class: "share", "aria-hidden": "true" });
  [
    [busy, "dense"],
    [stall, "stall"],
    [wait, "wait"],
  ].forEach(([part, name]) => {
    const piece = element("i");
    piece.style.cssText = `width:${100 * (part ?? 0)}%;background:var(--${name})`;
    bar.append(piece);
  });
  return bar;
}

const MOST_MARKS = 300;

function markTable(pipeline) {
  const rows = pipeline.marks.slice(0, MOST_MARKS).map((mark) => {
    const [ink, glyph] = MARK_STYLE[mark.event] ?? ["soft", "▸"],
      sign = element("span", {}, `${glyph} ${mark.event}`);
    sign.style.color = `var(--${ink})`;
    const go = element(
      "button",
      { type: "button", onclick: () => pipeline.showMoment(mark.t_ms) },
      milliseconds(mark.t_ms),
    );
    return [go, sign, markText(mark), mark.actor];
  });
  if (pipeline.marks.length > MOST_MARKS)
    rows.push(["…", "", `${pipeline.marks.length - MOST_MARKS} more`, ""]);
  return rows.length ? table([["at"], ["", true], ["what", true], ["told by", true]], rows) : null;
}

// Times between a request's tokens, in ms; of several candidates the first counts.
function timesBetween({ t = [], request = [], index = [] }, tickMs) {
  const first = new Map(),
    times = [];
  for (let i = 0; i < t.length; i++) {
    const key = `${request[i]} ${index[i]}`;
    if (first.has(key)) continue;
    first.set(key, t[i]);
    const before = first.get(`${request[i]} ${index[i] - 1}`);
    if (before !== undefined) times.push((t[i] - before) * tickMs);
  }
  return times;
}

function meanAndP99(values, text) {
  return `mean ${text(values?.mean)}, P99 ${text(values?.p99)}`;
}

function makeCurves(page, figures, pipeline, onChoose) {
  const { steps, head, tickMs, span } = page,
    decode = head.phases.indexOf("decode");
  const points = (valueOf) =>
    Array.from(steps.t.keys())
      .filter((i) => steps.phase[i] === decode)
      .map((i) => ({ ms: steps.t[i] * tickMs, value: valueOf(i), step: steps.step[i], index: i }))
      .filter(({ value }) => known(value));
  const curve = (id, title, valueOf, text, colourName, top, low, unitOf) => {
    const found = points(valueOf),
      values = Float64Array.from(found, ({ value }) => value).sort();
    return new Curve(
      {
        canvas: byId(id),
        title,
        points: found,
        spanMs: span * tickMs,
        text,
        colourName,
        absent: "not measured",
        low: low(values),
        top: top(values),
        unitOf,
      },
      onChoose,
    );
  };
  const zero = () => 0,
    high = (values) => Math.max(percentile(values, 0.995) * 1.2, 1e-6);
  byId("time-sub").textContent = `of decode; ${meanAndP99(figures.decode?.step_ms, milliseconds)}`;
  byId("hit-sub").textContent =
    `needed neurons found in memory; ${rate(figures.decode?.hit_rate)} of all`;
  byId("bytes-sub").textContent =
    `read from flash; ${meanAndP99(figures.decode?.token.bytes, bytes)}`;
  return [
    curve(
      "time-curve",
      "step time",
      (i) => steps.d[i] * tickMs,
      milliseconds,
      "accent",
      high,
      zero,
    ),
    curve(
      "hit-curve",
      "hit rate",
      (i) =>
        steps.hits[i] < 0 || steps.misses[i] < 0 || !(steps.hits[i] + steps.misses[i])
          ? null
          : steps.hits[i] / (steps.hits[i] + steps.misses[i]),
      rate,
      "gate",
      () => 1,
      (values) => (values.length ? Math.max(0, Math.floor((values[0] - 0.002) * 50) / 50) : 0),
    ),
    curve(
      "bytes-curve",
      "bytes a token",
      (i) => (steps.bytes[i] < 0 || !steps.tokens[i] ? null : steps.bytes[i] / steps.tokens[i]),
      bytes,
      "read",
      high,
      zero,
      byteUnit,
    ),
  ];
}

function describeView(page, view) {
  const { t, step, phase } = page.steps,
    tickMs = page.tickMs;
  const from = view.from * tickMs,
    to = view.to * tickMs,
    whole = milliseconds(page.span * tickMs);
  // The margins that are shown around steps do not belong to the ones before and behind.
  const slack = Math.min((view.to - view.from) * 0.025, page.usualTicks / 8);
  const last = Math.max(0, lowerBound(t, view.to - slack) - 1);
  let first = Math.max(0, lowerBound(t, view.from + slack + 1) - 1);
  if (first < last && t[first] + page.steps.d[first] < view.from + slack) first += 1;
  const steps =
    first === last
      ? `${page.head.phases[phase[first]]} step ${step[first]}`
      : `steps ${step[first]} to ${step[last]}`;
  if (!t.length) {
    byId("range").textContent = "no step was recorded";
    return;
  }
  const grain = Math.max((to - from) / 100, 1e-6);
  byId("range").textContent =
    `${steps} · ${moment(from, grain)} to ${moment(to, grain)} of ${whole}`;
}

function listenToButtons(pipeline) {
  const actions = {
    previous: () => pipeline.nextStep(-1),
    next: () => pipeline.nextStep(1),
    "zoom-in": () => pipeline.zoom(1 / 1.7),
    "zoom-out": () => pipeline.zoom(1.7),
    whole: () => pipeline.show(0, pipeline.span),
    fault: () => pipeline.showNextFault(),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  byId("fault").hidden = !pipeline.marks.some((mark) => mark.event === "fault");
}

async function start() {
  const { head, tables } = await unpack(byId("payload").textContent);
  const { figures } = head,
    tickMs = head.tick_ns / 1e6;
  const marks = [...figures.changes, ...figures.faults, ...figures.restarts].sort(
    (a, b) => a.t_ms - b.t_ms,
  );
  const tbt = timesBetween(tables.tokens, tickMs),
    steps = tables.steps;
  const decodeMs = Float64Array.from(steps.d)
    .filter((_, i) => head.phases[steps.phase[i]] === "decode")
    .map((d) => d * tickMs)
    .sort();
  const capMs =
    (percentile(decodeMs, 0.99) ?? Math.max(0, ...steps.d.slice(0, 1)) * tickMs) * 1.25 || 1;
  const usualTicks = percentile(Float64Array.from(steps.d).sort(), 0.5) ?? 0;
  const page = { usualTicks, head, tables, tickMs, span: head.span, steps, marks, capMs };
  fillFacts(figures.run);
  fillNotice(head);
  fillTiles(figures, tbt);
  const pipeline = new Pipeline(page, (view) => describeView(page, view));
  fillLegend(pipeline);
  fillTables(figures, pipeline);
  listenToButtons(pipeline);
  const histogram = new Histogram(byId("histogram"), byId("latency-sub"), tbt);
  const byNumber = (step) => pipeline.showStep(steps.step.indexOf(step));
  const charts = [histogram, ...makeCurves(page, figures, pipeline, byNumber)];
  const drawAll = () => {
    charts.forEach((chart) => chart.draw());
    pipeline.drawNow();
  };
  window.addEventListener("resize", drawAll);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    theme.colours = {};
    hatches.clear();
    drawAll();
  });
  drawAll();
  document.documentElement.dataset.state = "ready";
}

start().catch((error) => {
  document.documentElement.dataset.state = "failed";
  document
    .querySelector("main")
    .replaceChildren(
      element("p", { class: "failure" }, `This page could not be drawn: ${error.message}`),
    );
  console.error(error);
});
