// Operations on points; the letters are those of docs/mathematics.md.

const LARGEST = 1.7e308; // of coordinates, so that they stay finite

// -- points: embedding and energies ----------------------------------------------------------------

function normalize(op) {
  const { offset } = op.settings;
  return (x) => [x, 1, Math.sqrt(dot(x, x) + offset * offset)];
}

function bandedForm(op, net) {
  const { size, width, weight } = op.settings, rest = width * size, long = rest + size;
  const band = net.constant(op, "band"), last = net.constant(op, "last");
  return (x) => {
    let total = 0;
    for (let row = 0; row * size + rest < x.length; row++) {
      const image = rowTimes(x, row * size, long, band, row * long * size, size);
      total += dot(image, image);
    }
    const image = rowTimes(x, x.length - rest, rest, last, 0, rest);
    return (total + dot(image, image)) * weight;
  };
}

// -- points: the coordinate, and leaving -------------------------------------------------------------

const SIGNS = {
  "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b,
  sqrt: Math.sqrt, exp: Math.exp, log: Math.log, tanh: Math.tanh,
};

// A formula is a number, the name of a variable, or [operator or function, operand, …].
function evaluated(formula, values) {
  if (typeof formula === "number") return formula;
  if (typeof formula === "string") return values[formula];
  const [head, ...operands] = formula;
  return SIGNS[head](...operands.map((operand) => evaluated(operand, values)));
}

const advance = ({ formula }) => (tau, m, ...energies) =>
  tau === 0 ? 0 : evaluated(formula, { tau, m, n: energies.reduce((a, b) => a + b) });

const rebase = ({ settings: { scale, coordinate } }) => (z, m, tau) => {
  const alive = Number.isNaN(tau) ? tau : Number(tau !== 0);
  return [scaled(z, scale * inverse(tau)), Math.min(m * coordinate * tau, LARGEST), alive];
};
