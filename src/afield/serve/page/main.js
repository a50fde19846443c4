// The page: asks the service for its models, shows what it has answered, and sends what is tried.
import { drawCurve, drawReliability } from "./charts.js";
import { readFile, readRows } from "./inputs.js";
import { element, fill, number, percent, row } from "./elements.js";
import { explanation } from "./explain.js";

const $ = (id) => document.getElementById(id);
const state = { models: new Map(), name: null, timer: 0 };
const EVERY = 1500; // milliseconds
const COLUMNS = ["label", "mean", "probability", "p_value", "decision", "answer", "score", "variance"];

async function ask(path, body) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) });
  if (answer.status === 401) {
    const given = prompt("This service asks for a token:");
    if (given) { sessionStorage.setItem("token", given); return ask(path, body); }
  }
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

async function start() {
  const { models } = await ask("/v2/models");
  for (const model of models) {
    state.models.set(model.name, model);
    $("model").append(element("option", model.name, { value: model.name }));
  }
  $("model").addEventListener("change", () => choose($("model").value));
  if (models.length) choose(models[0].name);
}

function choose(name) {
  state.name = name;
  describe();
  fill($("answer"));
  refresh();
}

function describe() {
  const model = state.models.get(state.name), input = model.inputs[0], about = model.parameters;
  const text = input.datatype === "BYTES", shape = input.shape.slice(1);
  $("about").textContent = `version ${about.version}, ${model.platform}, ` +
    (about.alpha ? `refuses at most ${percent(about.alpha)} of in-domain inputs` : "not calibrated: refuses nothing") +
    (about.policy ? `. Policy: ${about.policy.guarantee}` : "");
  $("input-label").textContent = text ? "Texts, one a line" : "Rows, one a line";
  $("input-help").textContent = text ? "" :
    (about.features.length ? `Values in this order: ${about.features.map((name, j) => name + (about.categories[j] ? ` (${about.categories[j].join(", ")})` : "")).join(", ")}` : `Numbers of an input of shape ${shape.map((n) => (n < 0 ? "any" : n)).join(" × ") || "any"}, separated by commas`);
}

async function refresh() {
  clearTimeout(state.timer);
  const name = state.name;
  try {
    const found = await ask(`/v2/models/${encodeURIComponent(name)}/monitor`);
    if (name !== state.name) return; // another was chosen, and is asked for by itself
    if (found.version !== state.models.get(state.name).parameters.version) { // it was loaded anew
      state.models.set(name, await ask(`/v2/models/${encodeURIComponent(name)}`));
      describe();
    }
    showAlarms(found);
    showDrift(found.drift);
    showRecent(found);
    showReliability(found);
    $("status").textContent = "";
  } catch (error) {
    $("status").textContent = `The service does not answer: ${error.message}`;
  }
  state.timer = setTimeout(refresh, EVERY);
}

function showAlarms({ drift: { alarm }, risk }) {
  const labels = state.models.get(state.name).parameters.labels, box = $("alarm"), said = [];
  const where = alarm && alarm.group !== null ? ` of the class ${labels[alarm.group] ?? alarm.group}` : "";
  if (alarm) said.push(`Drift: the alarm${where} rang at row ${alarm.row}; it began about row ${alarm.began + 1}.`);
  if (risk && risk.alarm) said.push(`Errors: more than ${percent(risk.limit)} of the accepted answers are wrong, at least ${percent(risk.at_least)}.`);
  const message = said.join("\n");
  if (box.textContent !== message) box.textContent = message; // a screen reader says it once
  box.classList.toggle("ringing", said.length > 0);
}

function showDrift(drift) {
  const labels = state.models.get(state.name).parameters.labels;
  $("drift-text").textContent = `${drift.rows} rows, compared with ${drift.reference} reference rows and with each other. ` +
    `Evidence 10^${drift.evidence.toFixed(1)}, the alarm rings at 10^${drift.line.toFixed(1)}. ` +
    `Without drift it ever rings with probability ${drift.alpha} at most.`;
  drawCurve($("curve"), drift);
  const classes = Object.entries(drift.classes).sort((a, b) => b[1] - a[1]);
  $("by-class").hidden = !classes.length;
  fill($("classes"), element("caption", "Evidence of each class as a power of ten; its alarm rings at 0."), row("th", ["class", "evidence"], ["", "number"]),
    ...classes.map(([k, value]) => row("td", [labels[k] ?? k, value.toFixed(1)], ["", value >= 0 ? "number no" : "number"])));
  fill($("smallest"), row("th", ["row", "p-value", "input"], ["number", "number"]),
    ...drift.smallest.map((s) => row("td", [s.row, number(s.p_value), s.input], ["number", "number", "input"])));
}

function showRecent({ recent, refused }) {
  const first = [...refused, ...recent][0];
  const names = first ? COLUMNS.filter((k) => k in first) : [];
  const line = (answer) => {
    const verdict = answer.accepted === undefined ? "" : answer.accepted ? "accepted" : "refused";
    const cells = [new Date(1000 * answer.time).toTimeString().slice(0, 8), verdict, ...names.map((k) => typeof answer[k] === "number" ? number(answer[k]) : answer[k]), answer.input];
    const made = row("td", cells, ["", answer.accepted === false ? "no" : "yes", ...kinds, "input"]);
    made.classList.toggle("refused", answer.accepted === false);
    return made;
  };
  const kinds = names.map((k) => (first && typeof first[k] === "number" ? "number" : ""));
  const head = row("th", ["time", "verdict", ...names.map((k) => k.replace("_", "-")), "input"], ["", "", ...kinds]);
  const none = element("tr", element("td", "Nothing yet."));
  fill($("recent"), head, ...(first ? [...refused.map(line), ...recent.map(line)] : [none]));
}

function showReliability({ expected_accuracy: expected, reliability, risk }) {
  const labelled = reliability.reduce((sum, [count]) => sum + count, 0);
  const right = reliability.reduce((sum, [, , r]) => sum + r, 0);
  const parts = [];
  if (expected && expected.void) parts.push(`No accuracy can be promised any more. ${expected.void}`);
  else if (expected) parts.push(`Without labels: accuracy ${percent(expected.accuracy)} ± ${percent(expected.error)} of ${expected.count} accepted answers, while there is no drift and if the probabilities are calibrated.`);
  parts.push(labelled ? `With labels: ${percent(right / labelled)} of ${labelled} accepted answers are right.` : "No labels yet.");
  if (risk) parts.push(`Asked for: at most ${percent(risk.limit)} wrong.`);
  $("reliability-text").textContent = parts.join(" ");
  drawReliability($("reliability"), reliability);
}

async function predict(shape, data) {
  const model = state.models.get(state.name), input = model.inputs[0];
  const tensor = { name: input.name, shape, datatype: input.datatype, data };
  const answer = await ask(`/v2/models/${encodeURIComponent(state.name)}/infer`, { inputs: [tensor] });
  const articles = showAnswer(Object.fromEntries(answer.outputs.map((o) => [o.name, o])));
  refresh();
  if (!model.parameters.explains) return;
  const few = { ...tensor, shape: [articles.length, ...shape.slice(1)], data: data.slice(0, (data.length / shape[0]) * articles.length) };
  const { rows } = await ask(`/v2/models/${encodeURIComponent(state.name)}/explain`, { inputs: [few] });
  rows.forEach((why, i) => articles[i].append(...explanation(why)));
}

function showAnswer(outputs) {
  const main = outputs.label ?? outputs.mean, count = main.shape[0], made = [];
  for (let i = 0; i < Math.min(count, 10); i++) {
    const refused = outputs.accepted && !outputs.accepted.data[i];
    const value = (name) => outputs[name] && outputs[name].data[i];
    const answer = outputs.mean ? number(main.data[(i * main.data.length) / count]) : main.data[i];
    const title = element("p", refused ? element("span", "I don't know. ", { class: "no" }) : "",
      refused ? `The nearest guess is ${answer}.` : element("strong", String(answer), { class: "yes" }));
    const facts = ["p_value", "score", "variance", "decision"].filter((k) => value(k) !== undefined)
      .map((k) => `${k.replace("_", "-")} ${typeof value(k) === "number" ? number(value(k)) : value(k)}`);
    made.push(element("article", title, element("p", facts.join(", "), { class: "quiet" }), probabilities(outputs, i)));
  }
  fill($("answer"), ...made, count > 10 ? element("p", `and ${count - 10} more`) : "");
  return made;
}

function probabilities({ probabilities: probs }, i) {
  if (!probs) return "";
  const labels = state.models.get(state.name).parameters.labels, classes = probs.shape[1];
  const found = Array.from({ length: classes }, (_, k) => [labels[k] ?? k, probs.data[i * classes + k]]);
  found.sort((a, b) => b[1] - a[1]);
  return element("ul", ...found.slice(0, 5).map(([name, p]) =>
    element("li", element("span", String(name)), element("meter", "", { value: p, max: 1, "aria-label": `${name} ${percent(p)}` }), element("span", percent(p)))), { class: "probabilities" });
}

async function attempt(work) {
  try {
    await work();
  } catch (error) {
    fill($("answer"), element("p", error.message, { class: "no", role: "alert" }));
  }
}

$("try").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => predict(...readRows($("input").value, state.models.get(state.name))));
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try").requestSubmit();
});
const take = (file) => file && attempt(async () => predict(...(await readFile(file, state.models.get(state.name)))));
$("file").addEventListener("change", (event) => take(event.target.files[0]));
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("try").addEventListener(kind, (event) => {
    event.preventDefault();
    $("try").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files[0]);
  });
}
start().catch((error) => { $("status").textContent = error.message; });
