// ReSPro in the plane: reflect in a sphere that touches it, scale by 2/α, project back.

const point = { x: [1.6, 1.1], alpha: 1.5, step: 3 };
const REACH = 3; // the largest coordinate of x
const STEPS = ["the point", "reflected in the sphere", "scaled by 2/α", "projected to the plane"];

// The whole map on points, 2αx / (α² + ‖x‖²).
function respro(x, alpha) {
  const factor = (2 * alpha) / (alpha ** 2 + x[0] ** 2 + x[1] ** 2);
  return x.map((value) => value * factor);
}

// The steps in the cut: places along the ray through x, and heights above the plane.
function stepsOf(r, alpha) {
  const share = alpha ** 2 / (r ** 2 + alpha ** 2); // α² / ‖x − c‖²
  const reflected = [r * share, alpha - alpha * share];
  const scaled = reflected.map((value) => (value * 2) / alpha);
  return [[r, 0], reflected, scaled, [scaled[0], 0]];
}

const handle = svg("circle", { class: "handle", r: 0.35, tabindex: 0, role: "slider", "aria-label": "Point x" });

function dot(chart, [x, y], name, label, right = 0.14, up = 0.14) {
  chart.append(svg("circle", { class: name, cx: x, cy: -y, r: 0.09 }));
  chart.append(svg("text", { x: x + right, y: -y - up }, label));
}

const polyline = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(3)} ${(-y).toFixed(3)}`).join("");
// Where the labels of x, x′, x″ and y are, so that they do not cover each other.
const LABELS = [[0.12, 0.16], [-0.42, -0.05], [0.14, 0.1], [-0.3, 0.14]];

function drawPlane() {
  const plane = find("plane"), { x, alpha, step } = point, y = respro(x, alpha);
  const grid = [], warped = [];
  for (let a = -3; a <= 3; a += 0.5) {
    const line = Array.from({ length: 121 }, (_, i) => -3 + i / 20);
    for (const points of [line.map((b) => [a, b]), line.map((b) => [b, a])]) {
      grid.push(polyline([points[0], points[120]]));
      const ball = points.filter((one) => Math.hypot(...one) <= alpha); // which becomes the unit ball
      warped.push(polyline(ball.map((one) => respro(one, alpha))));
    }
  }
  const parts = [svg("path", { class: "thin", d: grid.join("") })];
  if (step === 3) parts.push(svg("path", { class: "warped", d: warped.join("") }));
  parts.push(svg("circle", { class: "sphere", r: alpha }), svg("circle", { class: "unit", r: 1 }));
  parts.push(svg("line", { class: "ray", x1: 0, y1: 0, x2: x[0], y2: -x[1] }));
  plane.replaceChildren(...parts);
  plane.append(svg("text", { x: 0.08, y: alpha + 0.3 }, "α"));
  dot(plane, x, "point-x", "x");
  if (step === 3) dot(plane, y, "point-y", "y");
  plane.append(handle); // above everything else, for the pointer
  handle.setAttribute("cx", x[0]);
  handle.setAttribute("cy", -x[1]);
  handle.setAttribute("aria-valuetext", `${x[0].toFixed(2)}, ${x[1].toFixed(2)}`);
  handle.setAttribute("aria-valuenow", x[0].toFixed(2));
}

function drawCut() {
  const cut = find("cut"), { x, alpha, step } = point, r = Math.hypot(...x);
  const places = stepsOf(r, alpha), names = ["x", "x′", "x″", "y"];
  cut.replaceChildren(
    svg("line", { class: "sphere", x1: -3.2, x2: 3.2, y1: 0, y2: 0 }),
    svg("circle", { class: "sphere", cx: 0, cy: -alpha, r: alpha }),
    svg("line", { class: "unit", x1: 1, x2: 1, y1: -0.12, y2: 0.12 }),
    svg("text", { x: 0.93, y: 0.42 }, "1"),
    svg("circle", { class: "point-mid", cx: 0, cy: -alpha, r: 0.05 }),
    svg("text", { x: -0.32, y: -alpha }, "c"),
    svg("text", { x: -0.32 - alpha * 0.707, y: -alpha * 1.707 - 0.1 }, "S"),
  );
  const lines = [[[0, alpha], places[0]], [[0, 0], places[2]], [places[2], places[3]]];
  lines.slice(0, step).forEach(([[x1, y1], [x2, y2]]) =>
    cut.append(svg("line", { class: "ray", x1, x2, y1: -y1, y2: -y2 })));
  places.slice(0, step + 1).forEach((place, i) =>
    dot(cut, place, ["point-x", "point-mid", "point-mid", "point-y"][i], names[i], ...LABELS[i]));
}

function drawRespro() {
  const { x, alpha, step } = point, r = Math.hypot(...x), places = stepsOf(r, alpha);
  drawPlane();
  drawCut();
  find("alpha-value").textContent = alpha.toFixed(2);
  const [along, height] = places[step].map((value) => value.toFixed(3));
  find("respro-text").textContent = `x = (${x.map((value) => value.toFixed(2)).join(", ")}), ‖x‖ = ${r.toFixed(3)}. ` +
    (step ? `${STEPS[step][0].toUpperCase()}${STEPS[step].slice(1)}: distance ${along} along the ray, height ${height}.` : "") +
    (step === 3 ? ` That is 2α‖x‖ / (α² + ‖x‖²).` : "");
}

function movePoint(x) {
  point.x = x.map((value) => Math.min(REACH, Math.max(-REACH, value)));
  drawRespro();
}

function fromPointer(event) {
  const box = find("plane").getBoundingClientRect();
  return [((event.clientX - box.left) / box.width - 0.5) * 6.4, -((event.clientY - box.top) / box.height - 0.5) * 6.4];
}

handle.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  handle.focus();
  handle.setPointerCapture(event.pointerId);
});
handle.addEventListener("pointermove", (event) => {
  if (handle.hasPointerCapture(event.pointerId)) movePoint(fromPointer(event));
});
handle.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  if (!(event.key in moves)) return;
  event.preventDefault();
  movePoint(point.x.map((value, axis) => value + moves[event.key][axis] * 0.1));
  handle.focus();
});
find("alpha").addEventListener("input", (event) => {
  point.alpha = Number(event.target.value);
  drawRespro();
});
find("steps").addEventListener("change", (event) => {
  point.step = Number(event.target.value);
  drawRespro();
});
