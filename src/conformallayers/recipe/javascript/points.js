// Operations on points; the letters are those of docs/mathematics.md.

const LARGEST = 1.7e308; // of coordinates, so that they stay finite

// -- points: embedding and energies ----------------------------------------------------------------

function normalize(op) {
  const { offset } = op.settings;
  return (x) => [x, 1, Math.sqrt(dot(x, x) + offset * offset)];
}

// 2 to a power, in two factors: one of them alone could leave the range of numbers.
function timesPower(x, exponent) {
  const half = Math.trunc(exponent / 2);
  return x * 2 ** half * 2 ** (exponent - half);
}

// The exponent e with |x| = f·2^e and 0.5 <= f < 1; 0 for zero.
function exponentOf(x) {
  if (x === 0) return 0;
  let e = Math.floor(Math.log2(x)) + 1;
  while (timesPower(x, -e) >= 1) e++;
  while (timesPower(x, -e) < 0.5) e--;
  return e;
}

function rescale(op) {
  return (z, m, tau) => {
    const high = largest(z) ** 0.6;
    let n = dot(z, z);
    if (n > high || (n < 1 / high && tau !== 0)) {
      const peak = peakOf(z), e = exponentOf(Number.isFinite(peak) ? peak : 1);
      z = z.map((value) => timesPower(value, -e));
      [m, tau, n] = [timesPower(m, e), timesPower(tau, -e), dot(z, z)];
    }
    return [z, m, tau, n * op.settings.weight];
  };
}

function quadraticForm(op, net) {
  const form = net.constant(op, "form"), { weight } = op.settings;
  return (x) => dot(rowTimes(x, 0, x.length, form, 0, x.length), x) * weight;
}

function bandedForm(op, net) {
  const { size, width, weight, factor } = op.settings, rest = width * size, long = rest + size;
  const band = net.constant(op, "band"), last = net.constant(op, "last");
  return (x) => {
    let total = 0;
    for (let row = 0; row * size + rest < x.length; row++) {
      const image = rowTimes(x, row * size, long, band, row * long * size, size);
      total += factor ? dot(image, image) : dot(image, x, size, 0, row * size);
    }
    const image = rowTimes(x, x.length - rest, rest, last, 0, rest);
    total += factor ? dot(image, image) : dot(image, x, rest, 0, x.length - rest);
    return total * weight;
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
