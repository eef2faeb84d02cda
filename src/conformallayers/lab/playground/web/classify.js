// The classifier: from the drawing, an example or a picture to the bars.

const networks = data.networks.map((entry) => ({ ...entry, net: new ConformalLayers.Network(entry.document) }));
const state = { chosen: networks[0], example: null, picture: null, input: null, scores: null };
const listeners = []; // called after each classification

function setBars(list, rows) {
  while (list.children.length > rows.length) list.lastChild.remove();
  while (list.children.length < rows.length) {
    const track = make("span", { className: "track" }, make("div", { className: "fill" }));
    const bar = make("div", {}, make("span", { className: "name" }), track, make("span", { className: "value" }));
    bar.setAttribute("role", "listitem");
    list.append(bar);
  }
  rows.forEach(({ name, share, best }, i) => {
    const bar = list.children[i];
    bar.className = best ? "bar best" : "bar";
    bar.querySelector(".name").textContent = name;
    bar.querySelector(".fill").style.width = `${100 * (share || 0)}%`;
    bar.querySelector(".value").textContent = Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–";
  });
}

function softmax(scores) {
  const most = Math.max(...scores), powers = Array.from(scores, (score) => Math.exp(score - most));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / total);
}

const grid = ([channels, height, width]) => [height, width];

// Return the image that the network gets, (C, H, W), from 0 to 1.
function imageFor(shape, fit) {
  const size = shape[1] * shape[2];
  if (shape[0] === 3 && state.picture) {
    const step = [SIDE / shape[2], SIDE / shape[1]];
    return state.picture.flatMap((map) => [...averaged(map, SIDE, grid(shape), 0, 0, step)]);
  }
  const exact = state.example && state.example.length === size; // as it is in the data
  const image = exact ? state.example.map((value) => value / 16) : [...fitted(drawing.ink, fit, grid(shape))];
  return shape[0] === 3 ? [...image, ...image, ...image] : image;
}

function classify() {
  const { net, labels, white, fit } = state.chosen, shape = net.document.input_shape;
  const image = imageFor(shape, fit), start = performance.now();
  state.input = Float32Array.from(image, (value) => value * white);
  state.scores = net.run(state.input);
  const time = performance.now() - start, shares = softmax(state.scores);
  const best = shares.indexOf(Math.max(...shares)), empty = image.every((value) => value === 0);
  paintPixels(find("seen"), image, shape);
  setBars(find("scores"), shares.map((share, i) => ({ name: labels[i], share, best: !empty && i === best })));
  find("verdict").textContent = empty ? "Nothing drawn yet" : `${labels[best]} (${(100 * shares[best]).toFixed(0)} %)`;
  find("timing").textContent = `${net.steps.length} operations, ${time.toFixed(1)} ms, ${shape[1]}×${shape[2]} pixels`;
  for (const listener of listeners) listener();
}

let waiting = false;
function classifySoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    classify();
  });
}

const drawing = new Drawing(find("ink"), () => {
  Object.assign(state, { example: null, picture: null });
  classifySoon();
});

function showExample({ pixels }) {
  Object.assign(state, { example: pixels, picture: null });
  drawing.set(enlarged(pixels.map((value) => value / 16), 8));
  classify();
}

async function showPicture(file) {
  try {
    state.picture = await readPicture(file);
  } catch {
    find("verdict").textContent = `${file.name} is no picture that this browser reads`;
    return;
  }
  state.example = null;
  drawing.set(inkOf(state.picture));
  classify();
}

find("network").append(...networks.map(({ name }, value) => make("option", { value, textContent: name })));
find("network").addEventListener("change", (event) => {
  state.chosen = networks[event.target.value];
  classify();
});
find("clear").addEventListener("click", () => drawing.clear());
find("file").addEventListener("change", (event) => {
  if (event.target.files.length) showPicture(event.target.files[0]);
  event.target.value = "";
});
for (const example of data.examples) {
  const canvas = make("canvas"), button = make("button", { type: "button" }, canvas);
  paintPixels(canvas, example.pixels.map((value) => value / 16), [1, 8, 8]);
  button.setAttribute("aria-label", `Example ${example.label}`);
  button.addEventListener("click", () => showExample(example));
  find("examples").append(button);
}
find("version").textContent = data.version;
window.playground = { input: () => [...state.input], scores: () => [...state.scores], extent: SIDE };
