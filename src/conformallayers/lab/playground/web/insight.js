// Rows of M, eigenimages of Q, and the terms of the denominator for the current picture.

const { insight } = data;
const inside = {
  layers: new ConformalLayers.Network(insight.layers), folded: new ConformalLayers.Network(insight.folded),
};

// Paint numbers of both signs: the colour is the sign, its opacity the size.
function paintSigned(canvas, values, [, height, width]) {
  Object.assign(canvas, { width, height, className: "pixels" });
  const context = canvas.getContext("2d"), most = Math.max(...values.map(Math.abs));
  const style = getComputedStyle(document.documentElement);
  context.clearRect(0, 0, width, height);
  values.forEach((value, i) => {
    context.globalAlpha = Math.abs(value) / most;
    context.fillStyle = style.getPropertyValue(value > 0 ? "--positive" : "--negative");
    context.fillRect(i % width, Math.floor(i / width), 1, 1);
  });
}

function tiles(list, images, describe) {
  const made = images.map((image, i) => {
    const canvas = make("canvas"), tile = make("div", { className: "tile" }, canvas, make("span"));
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", describe(i));
    tile.setAttribute("role", "listitem");
    return tile;
  });
  list.append(...made);
  return made;
}

// Return the terms that add up to τ: its first value, and what each energy adds.
function termsOf({ document: { operations } }, values) {
  let terms = [], count = 0;
  for (const { operation, reads, writes } of operations) {
    if (operation === "normalize") {
      terms = [{ name: "norm of x", value: values[writes[2]] }];
    } else if (operation === "advance") {
      const [before, after] = [values[reads[0]], values[writes[0]]];
      const energies = reads.slice(2).map((name) => values[name]), total = energies.reduce((a, b) => a + b);
      for (const energy of energies) {
        terms.push({ name: `ReSPro ${++count}`, value: total ? ((after - before) * energy) / total : 0 });
      }
    } else if (operation === "rebase") { // a factor of all terms
      const factor = values[writes[2]] / values[reads[2]];
      terms = terms.map((term) => ({ ...term, value: term.value * factor }));
    }
  }
  const total = terms.reduce((sum, { value }) => sum + value, 0);
  return terms.map(({ name, value }) => ({ name, share: total ? value / total : 0 }));
}

const templateTiles = tiles(find("templates"), insight.templates, (i) => `Row of M for ${insight.labels[i]}`);
const eigenTiles = tiles(find("eigenimages"), insight.eigenimages, (i) => `Eigenimage ${i + 1} of Q`);

function paintInsight() {
  templateTiles.forEach((tile, i) => paintSigned(tile.firstChild, insight.templates[i], insight.shape));
  eigenTiles.forEach((tile, i) => {
    paintSigned(tile.firstChild, insight.eigenimages[i], insight.shape);
    tile.lastChild.textContent = insight.eigenvalues[i].toPrecision(3);
  });
}

function showInsight() {
  const image = smallImage(), values = inside.layers.evaluate(image);
  const layered = values[inside.layers.document.output], scores = inside.folded.run(image);
  const best = scores.indexOf(Math.max(...scores));
  templateTiles.forEach((tile, i) => {
    tile.className = i === best ? "tile best" : "tile";
    tile.lastChild.textContent = `${insight.labels[i]}: ${scores[i].toFixed(1)}`;
  });
  setBars(find("terms"), termsOf(inside.layers, values));
  const most = Math.max(...Array.from(scores, (score, i) => Math.abs(score - layered[i])));
  find("insight-error").textContent = `Layer by layer and folded, the scores differ by ${most.toExponential(0)}.`;
}

find("insight-name").textContent = insight.name;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintInsight);
listeners.push(showInsight);
window.playground.terms = () => termsOf(inside.layers, inside.layers.evaluate(smallImage()));
paintInsight();
drawRespro();
showExample(data.examples[3]);
measureAll();
