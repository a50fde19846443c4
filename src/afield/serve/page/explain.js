// Why: the features that a row is odd in, and the training examples that are nearest to it.
import { element, number, row } from "./elements.js";

export function explanation({ nearest, features }) {
  const made = [];
  if (features && features.length) made.push(why(features));
  const list = nearest.map(({ label, input, picture, distance }) => {
    const text = [label, input].filter((part) => part !== undefined).join(": ");
    const about = `${text ? `${text}, ` : ""}distance ${number(distance)}`;
    return element("li", picture ? draw(picture, about) : "", element("span", about));
  });
  made.push(element("h3", "Nearest of the training examples that were kept"), element("ol", ...list, { class: "nearest" }));
  return made;
}

function why(features) {
  const head = row("th", ["feature", "value", "usual", "score then"], ["", "number", "number", "number"]);
  const lines = features.map((f) => row("td", [f.name, number(f.value), `${number(f.low)} to ${number(f.high)}`, number(f.score_without)],
    ["", f.unusual ? "number no" : "number", "number", "number"]));
  const title = element("caption", "Features that make it far, and the score with the nearest example's value.");
  return element("div", element("table", title, head, ...lines), { class: "scroll", tabindex: 0, role: "region", "aria-label": "Features that make it far" });
}

function draw(picture, text) {
  const height = picture.length, width = picture[0].length, canvas = element("canvas", "", { role: "img", "aria-label": text, width, height });
  const image = new ImageData(width, height);
  picture.flat().forEach((pixel, i) => { for (let c = 0; c < 3; c++) image.data[4 * i + c] = pixel[c % pixel.length]; image.data[4 * i + 3] = 255; });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
