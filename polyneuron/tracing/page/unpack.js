"use strict";
// Undoes packing.py: text -> deflate -> head and columns.

async function unpack(text) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack the page's data: use one of 2023 or later");
  }
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const headBytes = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headBytes)));
  const tables = {};
  let at = 4 + headBytes;
  for (const column of head.columns) {
    const end = at + column.count * column.planes;
    const [table, name] = column.name.split(".");
    tables[table] ??= {};
    tables[table][name] = unpackColumn(bytes.subarray(at, end), column);
    at = end;
  }
  return { head, tables };
}

function unpackColumn(bytes, { count, planes, delta }) {
  const numbers = new Float64Array(count);
  for (let plane = 0; plane < planes; plane++) {
    const weight = 2 ** (8 * plane);
    for (let i = 0, from = plane * count; i < count; i++) numbers[i] += weight * bytes[from + i];
  }
  let sum = 0;
  for (let i = 0; i < count; i++) {
    const half = numbers[i] / 2;
    const value = half === Math.floor(half) ? half : -Math.ceil(half);
    sum = delta ? sum + value : value;
    numbers[i] = sum;
  }
  return numbers;
}
