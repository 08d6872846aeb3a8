// Numbers and times as people read them, and elements made of them. What was not measured is "–".

const NONE = "–";

function known(value) {
  return value !== null && value !== undefined && !Number.isNaN(value);
}

function digits(value, most = 3) {
  const whole = Math.max(1, Math.floor(Math.log10(Math.abs(value) || 1)) + 1);
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, most - whole) });
}

function count(value) {
  return known(value) ? digits(value, 3) : NONE;
}

function milliseconds(ms) {
  if (!known(ms)) return NONE;
  const size = Math.abs(ms);
  if (size >= 60000) return `${Math.floor(ms / 60000)} min ${digits((ms % 60000) / 1000, 2)} s`;
  if (size >= 1000) return `${digits(ms / 1000, 4)} s`;
  if (size >= 1 || size === 0) return `${digits(ms, 3)} ms`;
  return `${digits(ms * 1000, 3)} µs`;
}

function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1)
    [value, unit] = [value / 1024, unit + 1];
  return `${digits(value, 3)} ${units[unit]}`;
}

// The unit that `bytes` shows a value in.
function byteUnit(value) {
  return value >= 1 ? 1024 ** Math.min(4, Math.floor(Math.log2(value) / 10)) : 1;
}

function several(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

function share(value) {
  return known(value) ? `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} %` : NONE;
}

// A rate near 1 needs the digits that tell it from 1.
function rate(value) {
  if (!known(value)) return NONE;
  return `${(100 * value).toFixed(value > 0.9 && value < 1 ? 2 : 1)} %`;
}

// A moment of the run, with as many decimals as `stepMs` between two of them needs.
function moment(ms, stepMs) {
  if (stepMs >= 100)
    return `${(ms / 1000).toFixed(Math.max(0, -Math.floor(Math.log10(stepMs / 1000))))} s`;
  return `${ms.toFixed(Math.max(0, -Math.floor(Math.log10(stepMs))))} ms`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// columns: [heading, is it text]; rows: arrays of texts or elements.
function table(columns, rows) {
  const cell = (tag, content, isText) => element(tag, isText ? { class: "text" } : {}, content);
  const heads = columns.map(([heading, isText]) => cell("th", heading, isText));
  const body = rows.map((row) =>
    element("tr", {}, ...row.map((content, i) => cell("td", content, columns[i][1]))),
  );
  const whole = element(
    "table",
    {},
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...body),
  );
  return element("div", { class: "scroll", tabindex: "0" }, whole);
}

function percentile(sorted, part) {
  if (!sorted.length) return null;
  const place = (sorted.length - 1) * part,
    below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (place - below);
}

// The first index whose value is not below; values rise.
function lowerBound(values, value) {
  let low = 0,
    high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
