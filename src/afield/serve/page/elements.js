// Small parts of the page. Text is always text: nothing that a model or a user says becomes HTML.
export function element(name, ...content) {
  const last = content.at(-1);
  const attributes = last !== null && typeof last === "object" && !(last instanceof Node) ? content.pop() : {};
  const made = document.createElement(name);
  made.append(...content);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function row(cell, values, classes = []) {
  const made = document.createElement("tr");
  values.forEach((value, i) => made.append(element(cell, value === null || value === undefined ? "" : String(value), { class: classes[i] || "", ...(cell === "th" ? { scope: "col" } : {}) })));
  return made;
}

export const fill = (place, ...content) => place.replaceChildren(...content);
export const percent = (value) => `${(100 * value).toFixed(value > 0.1 ? 0 : 1)}%`;

export function number(value) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e5) return String(value);
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(3);
}
