// Run folded networks in JavaScript: browsers and node, no dependencies.
//
//     const net = new ConformalLayers.Network(document);   // JSON of javascript_document
//     const scores = net.run(pixels);                      // one sample, any array of numbers
//
// A sample runs at a time. Features are Float32Array or Float64Array, sums are taken in float64, and
// the scalars of a sample (peak m, coordinate τ, energies n, growths g) are plain numbers.

const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array };
const REMEDY = 'Fold with strategy="dense", and write the document with this version.';

// The kind of an operation → a function of (operation, network) that returns its run.
const OPERATIONS = {
  matmul, conv: convolution, conv_transpose: convolution,
  avg_pool: average, adaptive_avg_pool: average, upsample: average, norm_pool: normPool,
  max_pool: maximum, adaptive_max_pool: maximum, pad,
  multiply: withConstant("factor", (x, factor) => x * factor),
  add_constant: withConstant("value", (x, value) => x + value),
  prelu: withConstant("slope", (x, slope) => (x > 0 ? x : x * slope)),
  add, product: gated, concatenate, slice, reshape: () => (x) => x, permute, elementwise, softmax,
  normalize, banded_form: bandedForm,
  sum_squares: ({ settings }) => (z) => dot(z, z) * settings.weight,
  advance, divide: ({ settings }) => (v, tau) => scaled(v, settings.scale * inverse(tau)),
  rebase,
};

function decoded({ dtype, data }) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new ARRAYS[dtype](bytes.buffer);
}

class Network {
  constructor(document) {
    for (const { operation } of document.operations) {
      if (!Object.hasOwn(OPERATIONS, operation)) {
        throw new Error(`Network: expected operations supported by JavaScript, got ${operation}. ${REMEDY}`);
      }
    }
    this.document = document;
    this.Array = ARRAYS[document.dtype];
    this.size = product(document.input_shape);
    this.arrays = {};
    for (const [name, entry] of Object.entries(document.constants)) this.arrays[name] = decoded(entry);
    this.steps = document.operations.map((op) => OPERATIONS[op.operation](op, this));
  }

  constant(op, key) {
    return this.arrays[op.constants[key]];
  }

  shape(op, key) {
    return this.document.constants[op.constants[key]].shape;
  }

  // Return every value by its name.
  evaluate(sample) {
    if (sample.length !== this.size) {
      throw new Error(`Network: expected ${this.size} numbers, got ${sample.length}. Give one sample.`);
    }
    const values = { x: new this.Array(sample) };
    this.document.operations.forEach(({ reads, writes }, index) => {
      const result = this.steps[index](...reads.map((name) => values[name]));
      if (writes.length === 1) values[writes[0]] = result;
      else writes.forEach((name, i) => { values[name] = result[i]; });
    });
    return values;
  }

  // Return the output, a Float32Array or Float64Array.
  run(sample) {
    return this.evaluate(sample)[this.document.output];
  }
}
