// What a person types or drops, as the shape and data of a tensor.
const size = (shape) => shape.slice(1).reduce((a, b) => a * b, 1);

export function readRows(text, model) {
  const input = model.inputs[0], lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!lines.length) throw new Error("There is no row yet.");
  if (input.datatype === "BYTES") return [[lines.length], lines];
  const { categories } = model.parameters, known = Object.keys(categories).length > 0;
  const code = (cell, values) => values.findIndex((v) => String(v) === cell || Number(cell) === v); // -1: unknown
  const rows = lines.map((line) => line.split(known ? /\s*[,;]\s*/ : /[,;\s]+/).filter(Boolean)
    .map((cell, j) => (j in categories ? code(cell, categories[j]) : Number(cell))));
  if (rows.some((row) => row.some(Number.isNaN))) throw new Error("Rows are numbers, separated by commas.");
  const width = input.shape.slice(1).includes(-1) ? null : size(input.shape);
  const bad = rows.findIndex((row) => row.length !== (width ?? rows[0].length));
  if (bad >= 0) throw new Error(`Row ${bad + 1} has ${rows[bad].length} numbers, expected ${width ?? rows[0].length}.`);
  const shape = width === null ? [rows.length, rows[0].length] : [rows.length, ...input.shape.slice(1)];
  return [shape, rows.flat()];
}

export async function readFile(file, model) {
  if (file.type.startsWith("image/")) return readImage(file, model);
  const text = await file.text();
  if (model.inputs[0].datatype === "BYTES") return readRows(text, model);
  const lines = text.split("\n").filter((line) => line.trim());
  const names = lines[0].split(",").map((name) => name.trim());
  if (names.every((name) => !Number.isNaN(Number(name)))) return readRows(text, model);
  const known = model.parameters.features;
  const order = known.length ? known.map((name) => names.indexOf(name)) : names.map((_, i) => i);
  if (order.includes(-1)) throw new Error(`The column ${known[order.indexOf(-1)]} is missing.`);
  const rows = lines.slice(1).map((line) => { const cells = line.split(","); return order.map((i) => cells[i]).join(","); });
  return readRows(rows.join("\n"), model);
}

async function readImage(file, model) {
  const [, channels, height, width] = model.inputs[0].shape;
  if (model.inputs[0].shape.length !== 4 || ![1, 3].includes(channels)) throw new Error("This model does not take images.");
  const picture = await createImageBitmap(file);
  const canvas = document.createElement("canvas");
  canvas.width = width > 0 ? width : picture.width;
  canvas.height = height > 0 ? height : picture.height;
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const pixels = data.length / 4, values = [];
  const scale = model.inputs[0].datatype === "UINT8" ? 1 : 255; // floating inputs lie between 0 and 1
  for (let c = 0; c < channels; c++) {
    for (let i = 0; i < pixels; i++) {
      const at = 4 * i, grey = Math.round(0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2]);
      values.push((channels === 1 ? grey : data[at + c]) / scale);
    }
  }
  return [[1, channels, canvas.height, canvas.width], values];
}
