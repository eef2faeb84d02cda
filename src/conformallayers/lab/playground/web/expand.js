// Train deep, deploy the same: one kernel trained as a chain of any depth, and a graph before and after its fold.

const CHAINS = [[], [3, 3], [1, 3, 3], [1, 3, 3, 1], [1, 3, 1, 3, 1]]; // sides of kernels that compose to 5×5
const WIDTH = 3, GRID = 28; // channels inside a chain, pixels of a side
const DEPLOYED = Float64Array.from({ length: 25 }, (_, i) => { // an edge filter
  const x = (i % 5) - 2, y = Math.floor(i / 5) - 2;
  return x * Math.exp(-(x * x + y * y) / 2);
});

// Return layers with random weights (outs, ins, side, side), the same at every visit.
function chainOf(sides) {
  let seed = 7;
  const draw = () => (seed = (seed * 48271) % 2147483647) / 2147483647 - 0.5;
  return sides.map((side, i) => {
    const ins = i ? WIDTH : 1, outs = i < sides.length - 1 ? WIDTH : 1;
    return { outs, ins, side, weights: Float64Array.from({ length: outs * ins * side * side }, draw) };
  });
}

// Run a layer without padding on maps (ins, n, n).
function correlate(maps, n, { outs, ins, side, weights }) {
  const m = n - side + 1, result = new Float64Array(outs * m * m);
  for (let o = 0; o < outs; o++) for (let y = 0; y < m; y++) for (let x = 0; x < m; x++) {
    let sum = 0;
    for (let i = 0; i < ins; i++) for (let v = 0; v < side; v++) for (let u = 0; u < side; u++) {
      sum += weights[((o * ins + i) * side + v) * side + u] * maps[(i * n + y + v) * n + x + u];
    }
    result[(o * m + y) * m + x] = sum;
  }
  return result;
}

function runChain(chain, maps, n) {
  for (const layer of chain) [maps, n] = [correlate(maps, n, layer), n - layer.side + 1];
  return maps;
}

// The kernel that a chain composes to: what it answers to one bright pixel, turned round.
function composed(chain) {
  const pixel = new Float64Array(81);
  pixel[40] = 1;
  return chain.length ? runChain(chain, pixel, 9).reverse() : new Float64Array(25);
}

function signedTile(values, side, label) {
  const canvas = make("canvas"), tile = make("div", { className: "tile" }, canvas, make("span", { textContent: label }));
  paintSigned(canvas, Array.from(values), [1, values.length / side, side]);
  tile.setAttribute("role", "listitem");
  return tile;
}

function drawExpansion() {
  const depth = Number(find("depth-trained").value), chain = chainOf(CHAINS[depth - 1]);
  const image = averaged(drawing.ink, SIDE, [GRID, GRID], 0, 0, [SIDE / GRID, SIDE / GRID]);
  const whole = composed(chain), kernel = { outs: 1, ins: 1, side: 5, weights: DEPLOYED.map((w, i) => w - whole[i]) };
  const deployed = correlate(image, GRID, { ...kernel, weights: DEPLOYED });
  const trained = correlate(image, GRID, kernel);
  if (chain.length) runChain(chain, image, GRID).forEach((value, i) => { trained[i] += value; });
  const most = deployed.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-300);
  const difference = trained.reduce((a, value, i) => Math.max(a, Math.abs(value - deployed[i])), 0) / most;
  find("kernels").replaceChildren(
    ...chain.map(({ weights, side }, i) => signedTile(weights, side, `${i + 1}: ${side}×${side}`)),
    signedTile(kernel.weights, 5, "+ kernel"), signedTile(DEPLOYED, 5, "= sum"),
    signedTile(trained, GRID - 4, "trained"), signedTile(deployed, GRID - 4, "deployed"),
  );
  const weights = chain.reduce((sum, layer) => sum + layer.weights.length, 25);
  find("depth-trained-value").textContent = depth;
  find("expand-text").textContent = `${weights} weights in training, 25 deployed, whatever the depth. ` +
    `On your picture both differ by ${difference.toExponential(0)} of the largest value.`;
}

// Draw nodes ({name, label, reads}) from top to bottom, each below what it reads.
function drawGraph(chart, nodes) {
  const level = {}, rows = [], places = {}, [width, height] = [100, 46];
  for (const { name, reads } of nodes) {
    level[name] = 1 + Math.max(-1, ...reads.map((read) => level[read]));
    (rows[level[name]] ??= []).push(name);
  }
  for (const [y, row] of rows.entries()) {
    row.forEach((name, i) => { places[name] = [160 + (i - (row.length - 1) / 2) * (width + 8), 20 + y * height]; });
  }
  chart.setAttribute("viewBox", `0 0 320 ${rows.length * height}`);
  for (const { name, label, reads } of nodes) {
    const [x, y] = places[name];
    for (const read of reads) {
      const [x1, y1] = places[read];
      chart.prepend(svg("line", { class: "axis", x1, y1: y1 + 13, x2: x, y2: y - 13 })); // behind all nodes
    }
    chart.append(svg("rect", { class: "node", x: x - width / 2, y: y - 13, width, height: 26, rx: 4 }));
    chart.append(svg("text", { x, y: y + 5, "text-anchor": "middle" }, label));
  }
}

find("depth-trained").addEventListener("input", drawExpansion);
for (const when of ["before", "after"]) drawGraph(find(`graph-${when}`), data.graph[when]);
find("graph-text").textContent = `${data.graph.before.length} nodes become ${data.graph.after.length}: ` +
  `${data.graph.multiply_adds.join(" multiply-adds become ")}.`;
listeners.push(drawExpansion);
