// Operations on points; the letters are those of docs/mathematics.md.

const LARGEST = 1.7e308; // of coordinates and growths, so that they stay finite

// -- points: embedding and energies ----------------------------------------------------------------

function normalize(op) {
  const { offset } = op.settings;
  return (x) => {
    const least = rounded(Math.min(offset, largest(x)), x), peak = Math.max(peakOf(x), least);
    const m = peak === 0 ? 1 : peak;
    const unit = x.map((value) => value / m);
    return [unit, m, Math.hypot(Math.sqrt(dot(unit, unit)), offset / m)];
  };
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

const GROWTHS = {
  projective: (q) => 1 + q,
  gnomonic: (q) => Math.sqrt(1 + q),
};

const advance = ({ settings: { rule } }) => (tau, m, ...energies) => {
  const n = energies.reduce((a, b) => a + b), small = inverse(tau);
  return rule === "published" ? tau + m * n : tau * GROWTHS[rule](n * small * small);
};

const rebase = ({ settings: { scale, coordinate } }) => (z, m, tau) => {
  const alive = Number.isNaN(tau) ? tau : Number(tau !== 0);
  return [scaled(z, scale * inverse(tau)), Math.min(m * coordinate * tau, LARGEST), alive];
};

// Divide a coefficient by the growth of every site that its part has passed.
const passed = (key, coefficient, growths) => key.reduce((k, site) => k / growths[site], coefficient);

function grow(op, net) {
  const { rule, linear, constant: fixed, coordinate, factor } = op.settings;
  const gram = net.constant(op, "gram"), count = fixed.length, first = count ? 1 : 0;
  const pairs = (linear.length * (linear.length + 1)) / 2;
  return (m, tau, ...values) => {
    const growths = values.slice(first + pairs);
    const ks = linear.map((key) => passed(key, inverse(tau), growths));
    let energy = 0, form = first;
    for (let a = 0; a < ks.length; a++) {
      for (let b = a; b < ks.length; b++) energy += ks[a] * ks[b] * values[form++] * (b > a ? 2 : 1);
    }
    if (count) {
      const cs = fixed.map((key) => passed(key, Number(tau !== 0), growths));
      energy += dot(rowTimes(cs, 0, count, gram, 0, count), cs);
      ks.forEach((k, index) => { energy += 2 * k * dot(cs, values[0], count, 0, index * count); });
    }
    const q = Math.max(energy, 0);
    if (rule !== "published") return Math.min(GROWTHS[rule](q), LARGEST);
    let t = m * tau * factor;
    for (const site of coordinate) t = Math.min(t * growths[site], LARGEST);
    return Math.min(1 + t * q, LARGEST);
  };
}

function combine(op, net) {
  const { linear, constant: fixed, scale } = op.settings, vectors = net.constant(op, "vectors");
  const size = product(op.to[0]);
  return (v, tau, ...growths) => {
    const sum = new Float64Array(size);
    const addPart = (array, index, coefficient) => {
      const k = rounded(coefficient, v);
      for (let i = 0; i < size; i++) sum[i] += k * array[index * size + i];
    };
    linear.forEach((key, index) => addPart(v, index, scale * passed(key, inverse(tau), growths)));
    fixed.forEach((key, index) => addPart(vectors, index, passed(key, Number(tau !== 0), growths)));
    return new v.constructor(sum);
  };
}
