// Time against depth: stacks of 1 to 9 layers, layer by layer and folded, measured here and now.

const ROUNDS = 9, ROUND = 1; // a round takes at least so many milliseconds, as timers are coarse
const stacks = data.depth.map(({ layers, folded }) => ({
  layers: new ConformalLayers.Network(layers), folded: new ConformalLayers.Network(folded),
}));
const times = stacks.map(() => ({ layers: [], folded: [], difference: 0 })); // microseconds, sorted
const measuring = { run: 0 };

const svg = (tag, attributes = {}, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
};

// The picture above as 8×8 pixels.
function smallImage() {
  if (state.example) return state.example.map((value) => value / 16);
  return [...fitted(drawing.ink, [1, "box"], [8, 8])];
}

function elapsed(run, repeats) {
  const start = performance.now();
  for (let i = 0; i < repeats; i++) run();
  return performance.now() - start;
}

// How often to run what is shorter than a round; the shorter of two tries is less disturbed.
function repeatsOf(run) {
  let repeats = 1;
  while (Math.min(elapsed(run, repeats), elapsed(run, repeats)) < ROUND) repeats *= 2;
  return repeats;
}

const median = (sorted) => sorted[sorted.length >> 1];

function measure(index) {
  const { layers, folded } = stacks[index], drawn = smallImage();
  const image = drawn.some(Boolean) ? drawn : data.examples[0].pixels; // zero is no case to measure
  const [a, b] = [layers.run(image), folded.run(image)];
  const size = Math.max(...Array.from(a, Math.abs));
  times[index].difference = Math.max(...Array.from(a, (score, i) => Math.abs(score - b[i]))) / size;
  for (const kind of ["layers", "folded"]) {
    const run = () => stacks[index][kind].run(image), repeats = (stacks[index].repeats ??= {});
    repeats[kind] ??= repeatsOf(run);
    times[index][kind].push((1000 * elapsed(run, repeats[kind])) / repeats[kind]);
    times[index][kind].sort((a, b) => a - b);
  }
}

// Microseconds with two digits, or whole ones.
const digits = (value) => value.toFixed(value < 10 ? 1 : 0);
const duration = (time) => (time < 1000 ? `${digits(time)} µs` : `${digits(time / 1000)} ms`);

function drawChart() {
  const chart = find("depth-chart"), chosen = Number(find("layers").value) - 1;
  const known = times.map(({ layers, folded }, i) => ({ i, layers: median(layers), folded: median(folded) }))
    .filter(({ layers }) => layers);
  const narrow = matchMedia("(max-width: 30rem)").matches;
  const [left, right, top, bottom] = [narrow ? 140 : 80, 620, 16, 250];
  const most = Math.max(1, ...known.map(({ layers }) => layers)) * 1.05;
  const x = (i) => left + ((right - left) * i) / (stacks.length - 1), y = (time) => bottom - ((bottom - top) * time) / most;
  chart.replaceChildren();
  for (const share of [0, 0.5, 1]) {
    const time = (share * most) / 1.05, at = y(time);
    chart.append(svg("line", { class: "axis", x1: left, x2: right, y1: at, y2: at }));
    chart.append(svg("text", { x: left - 12, y: at + 5, "text-anchor": "end" }, share ? duration(time) : "0"));
  }
  stacks.forEach((_, i) => chart.append(svg("text", { x: x(i), y: bottom + 34, "text-anchor": "middle" }, i + 1)));
  chart.append(svg("line", { class: "selected", x1: x(chosen), x2: x(chosen), y1: top, y2: bottom }));
  for (const kind of ["layers", "folded"]) {
    const name = kind === "layers" ? "layered" : "folded";
    const path = known.map((time, order) => `${order ? "L" : "M"}${x(time.i)} ${y(time[kind])}`).join("");
    chart.append(svg("path", { class: name, d: path }));
    for (const time of known) {
      chart.append(svg("circle", { class: name, cx: x(time.i), cy: y(time[kind]), r: time.i === chosen ? 7 : 4 }));
    }
  }
  find("layers-value").textContent = chosen + 1;
  const time = known.find(({ i }) => i === chosen);
  if (!time || !measuring.done) return; // one announcement, not one for every round
  const ratio = time.layers / time.folded, plural = chosen ? "layers" : "layer";
  find("depth-result").textContent = `${chosen + 1} ${plural}: ${duration(time.layers)} layer by layer, ` +
    `${duration(time.folded)} folded, ${digits(ratio)} times faster. ` +
    `The scores differ by ${times[chosen].difference.toExponential(0)} of the largest.`;
}

// Measure all depths in turns, so that a busy moment slows all alike and the page stays usable.
async function measureAll() {
  const run = ++measuring.run;
  measuring.done = false;
  for (const time of times) Object.assign(time, { layers: [], folded: [] });
  for (let round = 0; round < ROUNDS; round++) {
    for (let index = 0; index < stacks.length; index++) {
      await new Promise((done) => setTimeout(done));
      if (run !== measuring.run) return;
      measure(index);
    }
    measuring.done = round === ROUNDS - 1;
    drawChart();
  }
}

find("layers").addEventListener("input", drawChart);
find("measure").addEventListener("click", measureAll);
matchMedia("(max-width: 30rem)").addEventListener("change", drawChart);
window.playground.measured = () => Boolean(measuring.done);
