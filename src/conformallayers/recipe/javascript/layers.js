// Operations on features: each takes (operation, network) and returns a function of its inputs.

const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
const inverse = (t) => (t === 0 ? 0 : 1 / t); // NaN stays NaN
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const like = (x, size = x.length) => new x.constructor(size);

// One number for each sample, rounded as an array of features would hold it.
const rounded = (number, x) => (x instanceof Float32Array ? Math.fround(number) : number);

function scaled(z, number) {
  const factor = rounded(number, z);
  return z.map((value) => value * factor);
}

function dot(a, b, size = a.length, startA = 0, startB = 0) {
  let sum = 0;
  for (let i = 0; i < size; i++) sum += a[startA + i] * b[startB + i];
  return sum;
}

// Return (start, …) times a matrix (size, columns) that begins at an offset of its array.
function rowTimes(x, start, size, matrix, offset, columns) {
  const image = new Float64Array(columns);
  for (let i = 0; i < size; i++) {
    const value = x[start + i];
    for (let j = 0; j < columns; j++) image[j] += value * matrix[offset + i * columns + j];
  }
  return image;
}

function addMultiple(sums, start, factor, values) {
  for (let i = 0; i < values.length; i++) sums[start + i] += factor * values[i];
}

// -- products and convolutions -----------------------------------------------------------------

function matmul(op, net) {
  const weight = net.constant(op, "weight"), bias = net.constant(op, "bias");
  const [rows, columns] = net.shape(op, "weight");
  return (x) => {
    const count = x.length / columns, y = like(x, count * rows);
    for (let r = 0; r < count; r++) {
      for (let i = 0; i < rows; i++) {
        const sum = dot(weight, x, columns, i * columns, r * columns);
        y[r * rows + i] = bias ? sum + bias[i] : sum;
      }
    }
    return y;
  };
}

// One, two or three spatial axes as three.
const spatial = (sizes, fill) => [...Array(3 - sizes.length).fill(fill), ...sizes];

// The places j along an axis that a tap of the kernel reads: 0 <= j·stride + shift < size.
function span(size, stride, shift, places) {
  const first = Math.max(0, Math.ceil(-shift / stride));
  return { shift, first, last: Math.min(places - 1, Math.floor((size - 1 - shift) / stride)) };
}

// A convolution reads entry j·stride + shift of its input and writes entry j. A transposed one
// reads entry j and writes entry j·stride + shift. For each input channel and tap, the channel is
// moved to where it is written; then every output channel adds a multiple of it.
function convolution(op, net) {
  const transposed = op.operation === "conv_transpose", { settings } = op;
  const weight = net.constant(op, "weight"), bias = net.constant(op, "bias");
  const kernel = spatial(net.shape(op, "weight").slice(2), 1);
  const [stride, dilation] = [spatial(settings.stride, 1), spatial(settings.dilation, 1)];
  const padding = spatial(settings.padding, 0), [inputs, outputs] = [op.from[0][0], op.to[0][0]];
  const from = spatial(op.from[0].slice(1), 1), to = spatial(op.to[0].slice(1), 1);
  const [dense, strided] = transposed ? [to, from] : [from, to];
  const perInput = inputs / settings.groups, perOutput = outputs / settings.groups;
  const spans = kernel.map((size, axis) => Array.from({ length: size }, (_, k) =>
    span(dense[axis], stride[axis], k * dilation[axis] - padding[axis], strided[axis])));
  const taps = spans[0].flatMap((a) => spans[1].flatMap((b) => spans[2].map((c) => [a, b, c])));
  const size = product(to), plane = product(from);

  function move(x, start, moved, [rows, columns, line]) {
    const { first, last } = line, step = stride[2];
    moved.fill(0);
    for (let a = rows.first; a <= rows.last; a++) {
      const row = (a * stride[0] + rows.shift) * dense[1] + columns.shift;
      for (let b = columns.first; b <= columns.last; b++) {
        const wide = (row + b * stride[1]) * dense[2] + line.shift;
        const short = (a * strided[1] + b) * strided[2];
        if (transposed) {
          for (let c = first; c <= last; c++) moved[wide + c * step] = x[start + short + c];
        } else {
          for (let c = first; c <= last; c++) moved[short + c] = x[start + wide + c * step];
        }
      }
    }
  }

  return (x) => {
    const sums = new Float64Array(outputs * size), moved = new Float64Array(size);
    if (bias) bias.forEach((value, o) => sums.fill(value, o * size, (o + 1) * size));
    for (let input = 0; input < inputs; input++) {
      const group = Math.floor(input / perInput);
      for (let k = 0; k < taps.length; k++) {
        move(x, input * plane, moved, taps[k]);
        for (let o = group * perOutput; o < (group + 1) * perOutput; o++) {
          const row = transposed ? input * perOutput + (o % perOutput) : o * perInput + (input % perInput);
          addMultiple(sums, o * size, weight[row * taps.length + k], moved);
        }
      }
    }
    return new x.constructor(sums);
  };
}

// -- windows, margins and interpolation: tables of one axis after the other ----------------------

// Replace the entries along each axis: position j starts as `start` and takes in those of its table.
function along(op, x, start, takeIn) {
  const shape = [...op.from[0]];
  let values = new Float64Array(x);
  for (const { axis, positions, places, weights } of op.tables) {
    const size = shape[axis], after = product(shape.slice(axis + 1));
    const before = product(shape.slice(0, axis)), taps = places.length / positions;
    const result = new Float64Array(before * positions * after).fill(start);
    for (let b = 0; b < before; b++) {
      for (let tap = 0; tap < taps; tap++) {
        for (let j = 0; j < positions; j++) {
          const place = places[tap * positions + j], weight = weights?.[tap * positions + j];
          if (place < 0) continue;
          const source = (b * size + place) * after, target = (b * positions + j) * after;
          for (let i = 0; i < after; i++) {
            result[target + i] = takeIn(result[target + i], values[source + i], weight);
          }
        }
      }
    }
    values = result;
    shape[axis] = positions;
  }
  return values;
}

const weighted = (sum, value, weight) => sum + (weight ?? 1) * value;
const average = (op) => (x) => new x.constructor(along(op, x, 0, weighted));
const larger = (most, value) => Math.max(most, value); // NaN stays NaN
const copied = (_, value) => value;
const maximum = (op) => (x) => new x.constructor(along(op, x, -Infinity, larger));
const pad = (op) => (x) => new x.constructor(along(op, x, op.settings.value, copied));

function normPool(op) {
  const count = product(op.settings.kernel);
  return (x) => {
    const means = along(op, Float64Array.from(x, (value) => value * value), 0, weighted);
    return x.constructor.from(means, (mean) => Math.sqrt(mean * count));
  };
}

// -- sums and shapes -----------------------------------------------------------------------------

// Return, for each entry of a sample, the entry of a constant that broadcasts to it.
function broadcast(shape, constant) {
  const index = new Int32Array(product(shape)), missing = shape.length - constant.length;
  for (let i = 0; i < index.length; i++) {
    let rest = i, step = 1;
    for (let axis = shape.length - 1; axis >= missing; axis--) {
      const size = constant[axis - missing];
      if (size > 1) index[i] += (rest % shape[axis]) * step;
      step *= size;
      rest = Math.floor(rest / shape[axis]);
    }
  }
  return index;
}

const withConstant = (key, combine) => (op, net) => {
  const constant = net.constant(op, key), index = broadcast(op.from[0], net.shape(op, key));
  return (x) => x.map((value, i) => combine(value, constant[index[i]]));
};

const add = () => (...values) => {
  const sum = new Float64Array(values[0]);
  for (const value of values.slice(1)) for (let i = 0; i < sum.length; i++) sum[i] += value[i];
  return new values[0].constructor(sum);
};

function gated(op) {
  const [left, right] = op.from.map((shape) => broadcast(op.to[0], shape));
  return (x, y) => like(x, left.length).map((_, i) => x[left[i]] * y[right[i]]);
}

function concatenate(op) {
  const { axis } = op.settings, before = product(op.to[0].slice(0, axis));
  return (...values) => {
    const y = like(values[0], product(op.to[0]));
    let target = 0;
    for (let b = 0; b < before; b++) {
      for (const value of values) {
        const size = value.length / before;
        y.set(value.subarray(b * size, (b + 1) * size), target);
        target += size;
      }
    }
    return y;
  };
}

function slice(op) {
  const { axis, start, stop } = op.settings, shape = op.from[0];
  const before = product(shape.slice(0, axis)), after = product(shape.slice(axis + 1));
  return (x) => {
    const y = like(x, product(op.to[0])), size = (stop - start) * after;
    for (let b = 0; b < before; b++) {
      const first = (b * shape[axis] + start) * after;
      y.set(x.subarray(first, first + size), b * size);
    }
    return y;
  };
}

function permute(op) {
  const { order } = op.settings, from = op.from[0], to = op.to[0];
  const strides = from.map((_, axis) => product(from.slice(axis + 1)));
  const index = new Int32Array(product(from)).map((_, i) => {
    let place = 0, rest = i;
    for (let axis = to.length - 1; axis >= 0; axis--) {
      place += (rest % to[axis]) * strides[order[axis]];
      rest = Math.floor(rest / to[axis]);
    }
    return place;
  });
  return (x) => like(x).map((_, i) => x[index[i]]);
}

// -- functions of single numbers -------------------------------------------------------------------

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

// erf by a series of positive terms, which is 1 to rounding from 6 on.
function erf(x) {
  if (Math.abs(x) >= 6) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) {
    term *= (2 * x * x) / (2 * n + 1);
    sum += term;
  }
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const FUNCTIONS = {
  abs: Math.abs,
  relu: (x) => Math.max(x, 0),
  clip,
  leaky_relu: (x, slope) => (x > 0 ? x : x * slope),
  gelu: (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  silu: (x) => x * sigmoid(x),
  sigmoid,
  tanh: Math.tanh,
  hardswish: (x) => (x * clip(x + 3, 0, 6)) / 6,
  hardsigmoid: (x) => clip(x + 3, 0, 6) / 6,
};

function elementwise(op) {
  const run = FUNCTIONS[op.settings.function], [a, b] = op.settings.parameters;
  return (x) => x.map((value) => run(value, a, b));
}

function softmax(op) {
  const { axis, log } = op.settings, shape = op.from[0], size = shape[axis];
  const after = product(shape.slice(axis + 1));
  return (x) => {
    const y = like(x);
    for (let line = 0; line < x.length / size; line++) {
      const first = Math.floor(line / after) * size * after + (line % after);
      const values = Array.from({ length: size }, (_, i) => x[first + i * after]);
      const largest = Math.max(...values);
      const total = values.reduce((sum, value) => sum + Math.exp(value - largest), 0);
      values.forEach((value, i) => {
        const centred = value - largest;
        y[first + i * after] = log ? centred - Math.log(total) : Math.exp(centred) / total;
      });
    }
    return y;
  };
}
