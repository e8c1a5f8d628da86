// The inner loops, for one instruction set: LANES floats per vector, and NAME.
//
// A sum has one vector of partial sums, whose lanes are added at the end. Its order of additions
// depends on the matrix alone, never on the number of rows: a row has the same result, bit for bit,
// alone and in a window.
#include "kernels.h"

#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace jaxdraft {
namespace {

constexpr int L = LANES;
typedef float Floats __attribute__((vector_size(4 * L)));
typedef int32_t Ints __attribute__((vector_size(4 * L)));
typedef uint32_t Words __attribute__((vector_size(4 * L)));
typedef uint16_t Halves __attribute__((vector_size(2 * L)));
typedef uint8_t Bytes __attribute__((vector_size(L)));
typedef float Four __attribute__((vector_size(16)));

constexpr int OUTPUTS = 4;             // of a group
constexpr int ROWS = 4;                 // multiplied at once at most
constexpr int64_t PANEL = 1024;        // numbers of a row that are decoded at once: first-level cache
constexpr int64_t DENSE_PANEL = 4096;
constexpr int64_t VECTORS = 128;  // of bytes of a row, that are multiplied as they are decoded

// Outputs that share a loaded x. All sums stay in registers, of which there are 16, or 32 of 512 bits.
constexpr int outputs_at_once(int rows) { return L == 16 || rows == 1 ? OUTPUTS : 2; }

template <class To, class From>
inline To load(const From* from) {
  To to;
  memcpy(&to, from, sizeof to);
  return to;
}

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// L numbers of one or two bytes. Compilers make scalar code of __builtin_convertvector from bytes.
inline Words widened(const uint8_t* from) {
#if LANES == 16
  return bits_of<Words>(_mm512_cvtepu8_epi32(load<__m128i>(from)));
#elif LANES == 8
  return bits_of<Words>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load<Bytes>(from), Words);
#endif
}

inline Words widened(const uint16_t* from) {
#if LANES == 16
  return bits_of<Words>(_mm512_cvtepu16_epi32(load<__m256i>(from)));
#elif LANES == 8
  return bits_of<Words>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
  return __builtin_convertvector(load<Halves>(from), Words);
#endif
}

inline Floats all(float value) { return value - Floats{}; }

inline float from_bf16(uint16_t h) { return bits_of<float>(uint32_t(h) << 16); }

inline uint16_t to_bf16(float value) {
  const uint32_t u = bits_of<uint32_t>(value);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);  // not a number
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Subnormal numbers are converted as integers: XLA may run with subnormal floats treated as zero.
inline float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, size = h & 0x7fff;
  const float small = float(size) * 5.9604644775390625e-8f;  // 2**-24
  const uint32_t normal = (size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23);
  return bits_of<float>((size < 0x400 ? bits_of<uint32_t>(small) : normal) | sign);
}

inline float from_e8m0(uint8_t e) {
  if (e == 255) return bits_of<float>(0x7fc00000);
  return bits_of<float>(e ? uint32_t(e) << 23 : 0x00400000u);
}

float from_e4m3(uint8_t e) {
  const uint32_t sign = uint32_t(e & 0x80) << 24, size = e & 0x7f;
  const float small = float(size) * 0.001953125f;  // 2**-9
  uint32_t found = size < 8 ? bits_of<uint32_t>(small) : (size << 20) + (120u << 23);
  if (size == 0x7f) found = 0x7fc00000;
  return bits_of<float>(found | sign);
}

float from_e2m1(uint8_t e) {
  const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return e & 8 ? -sizes[e & 7] : sizes[e & 7];
}

// The numbers that values stand for; `repeated` has those of two bits four times.
struct Table {
  float value[256], repeated[16];
};

Table tabulate(Values values) {
  Table table;
  for (int i = 0; i < 256; i++)
    table.value[i] = values == INTEGER ? float(i)
                     : values == E4M3  ? from_e4m3(uint8_t(i))
                                       : from_e2m1(uint8_t(i & 15));
  for (int i = 0; i < 16; i++) table.repeated[i] = table.value[i & 3];
  return table;
}

// to[i] = from[first + i], as floats.
void widen(const Array& from, int64_t first, int64_t count, float* to) {
  const uint8_t* bytes = static_cast<const uint8_t*>(from.data);
  const uint16_t* halves = static_cast<const uint16_t*>(from.data);
  switch (from.type) {
    case F32:
      memcpy(to, static_cast<const float*>(from.data) + first, sizeof(float) * count);
      break;
    case BF16:
      for (int64_t i = 0; i < count; i++) to[i] = from_bf16(halves[first + i]);
      break;
    case F16:
      for (int64_t i = 0; i < count; i++) to[i] = from_f16(halves[first + i]);
      break;
    case U8:
      for (int64_t i = 0; i < count; i++) to[i] = bytes[first + i];
      break;
    case S8:
      for (int64_t i = 0; i < count; i++) to[i] = int8_t(bytes[first + i]);
      break;
    case E8M0:
      for (int64_t i = 0; i < count; i++) to[i] = from_e8m0(bytes[first + i]);
      break;
    default:
      for (int64_t i = 0; i < count; i++) to[i] = 0;
  }
}

// Multiplies scales by coarse ones. Example, fine = 2: blocks 3..5 use the factors 1, 2, 2.
void refine(const Product& p, const Array& coarse, int64_t group, int64_t first, int64_t count,
            float* to) {
  if (coarse.type == NONE) return;
  const int64_t width = (p.blocks + p.fine - 1) / p.fine;
  for (int64_t i = 0; i < count;) {
    const int64_t at = (first + i) / p.fine;
    int64_t end = (at + 1) * p.fine - first;
    if (end > count) end = count;
    float factor;
    widen(coarse, group * width + at, 1, &factor);
    for (; i < end; i++) to[i] *= factor;
  }
}

// Whether a weight is more than (value - 2**(bits - 1)) * scale.
inline bool is_general(const Product& p) {
  return p.zeros.type != NONE || p.minima.type != NONE || p.values != INTEGER;
}

// Weight = (value - zero) * scale + minimum, one of each for a block.
struct Blocks {
  const float *scale, *zero, *minimum;
};

// Reads what belongs to `count` blocks of an output; `room` has place for three times as many.
template <bool GENERAL>
inline Blocks read_blocks(const Product& p, int64_t output, int64_t first, int64_t count,
                          float* room) {
  const int64_t group = p.group == 1 ? output : output / p.group, at = group * p.blocks + first;
  Blocks found = {room, room + count, room + 2 * count};
  if (p.scales.type == F32 && p.coarse.type == NONE) {
    found.scale = static_cast<const float*>(p.scales.data) + at;
  } else {
    widen(p.scales, at, count, room);
    refine(p, p.coarse, group, first, count, room);
  }
  if (!GENERAL) return found;
  float *zero = room + count, *minimum = room + 2 * count;
  if (p.zeros.type != NONE) {
    widen(p.zeros, at, count, zero);
  } else {
    const bool centred = p.minima.type == NONE && p.values == INTEGER;
    for (int64_t i = 0; i < count; i++) zero[i] = centred ? float(1 << (p.bits - 1)) : 0.0f;
  }
  if (p.minima.type != NONE) {
    widen(p.minima, at, count, minimum);
    refine(p, p.coarse_minima, group, first, count, minimum);
  } else {
    for (int64_t i = 0; i < count; i++) minimum[i] = 0;
  }
  return found;
}

inline Floats rounded(Floats x) {
  const Words u = bits_of<Words>(x);
  const Words nan = bits_of<Words>((u & 0x7fffffff) > 0x7f800000);
  const Words near = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
  return bits_of<Floats>((nan & (u | 0x400000)) | (~nan & near));
}

// The n-th value of each of L bytes.
template <int BITS>
inline Words field(Words bytes, int n) {
  return bytes >> (BITS * n) & ((1u << BITS) - 1);
}

// Weights of a block, from its bytes. A multiplication and a subtraction of a power of two are one
// instruction, rounded once: v * s - 8 s is (v - 8) * s.
template <int BITS, bool ROUND, bool GENERAL>
struct ByArithmetic {
  Floats scale, zero, minimum;
  ByArithmetic(float s, float z, float m, const float*)
      : scale(all(s)),
        zero(all(GENERAL ? z : -s * float(1 << (BITS - 1)))),
        minimum(all(GENERAL ? m : 0)) {}
  Floats operator()(Words bytes, int n) const {
    const Floats value = __builtin_convertvector(bits_of<Ints>(field<BITS>(bytes, n)), Floats);
    const Floats weight = GENERAL ? (value - zero) * scale + minimum : value * scale + zero;
    return ROUND ? rounded(weight) : weight;
  }
};

#ifdef __AVX512F__
// A register holds the weights of all values of four bits, or four times those of two bits. Its
// instruction reads the lowest four bits of an index and no others.
template <int BITS, bool ROUND, bool GENERAL>
struct ByTable {
  Floats weight;
  ByTable(float s, float z, float m, const float* values) {
    Floats value = load<Floats>(values);
    weight = GENERAL ? (value - all(z)) * all(s) + all(m)
                     : (value - all(float(1 << (BITS - 1)))) * all(s);
    if (ROUND) weight = rounded(weight);
  }
  Floats operator()(Words bytes, int n) const {
    return bits_of<Floats>(_mm512_permutexvar_ps(bits_of<__m512i>(bytes >> (BITS * n)),
                                                 bits_of<__m512>(weight)));
  }
};
template <int BITS, bool ROUND, bool GENERAL>
struct Choice {
  using Decoder = ByTable<BITS, ROUND, GENERAL>;
};
template <bool ROUND, bool GENERAL>
struct Choice<8, ROUND, GENERAL> {
  using Decoder = ByArithmetic<8, ROUND, GENERAL>;
};
#else
template <int BITS, bool ROUND, bool GENERAL>
struct Choice {
  using Decoder = ByArithmetic<BITS, ROUND, GENERAL>;
};
#endif

// to[i] = what belongs to byte i, from what belongs to its block.
void spread(const float* blocks, int64_t width, int64_t skip, int64_t bytes, float* to) {
  int64_t i = 0;
  for (int64_t b = 0; i < bytes; b++) {
    int64_t end = (b + 1) * width - skip;
    if (end > bytes) end = bytes;
    for (; i < end; i++) to[i] = blocks[b];
  }
  for (int l = 0; l < L; l++) to[bytes + l] = 0;  // padding has the weight 0
}

inline const uint8_t* bytes_of(const Product& p, int64_t output) {
  return static_cast<const uint8_t*>(p.weight.data) + output * (p.inputs * p.bits / 8);
}

// Decodes the bytes from..to-1 of an output, padded with zeros to full vectors.
template <int BITS, bool ROUND, bool GENERAL>
void decode(const Product& p, const float* table, int64_t output, int64_t from, int64_t to,
            float* out) {
  constexpr int PLANES = 8 / BITS;
  const int64_t width = p.block / PLANES;
  const uint8_t* raw = bytes_of(p, output);
  const int64_t first = from / width, count = (to - 1) / width + 1 - first;
  float room[3 * (PANEL + 2)];
  const Blocks blocks = read_blocks<GENERAL>(p, output, first, count, room);
  int64_t at = from;
  if (width % L == 0 && p.values == INTEGER) {  // a vector lies in one block
    for (int64_t b = 0; b < count; b++) {
      int64_t end = (first + b + 1) * width;
      if (end > to) end = to;
      const ByArithmetic<BITS, ROUND, GENERAL> weight(blocks.scale[b], blocks.zero[b],
                                                      blocks.minimum[b], table);
      for (; at < end; at += L, out += L * PLANES) {
        const Words bytes = widened(raw + at);
        for (int n = 0; n < PLANES; n++) {
          const Floats found = weight(bytes, n);
          memcpy(out + n * L, &found, sizeof found);
        }
      }
    }
    return;
  }
  float scale[PANEL + L], zero[PANEL + L], minimum[PANEL + L];
  const int64_t skip = from - first * width;
  spread(blocks.scale, width, skip, to - from, scale);
  if (GENERAL) {
    spread(blocks.zero, width, skip, to - from, zero);
    spread(blocks.minimum, width, skip, to - from, minimum);
  }
  for (; at < to; at += L, out += L * PLANES) {
    uint8_t left[L] = {};
    memcpy(left, raw + at, to - at < L ? to - at : L);
    const Words bytes = widened(left);
    const Floats s = load<Floats>(scale + (at - from));
    for (int n = 0; n < PLANES; n++) {
      const Words q = field<BITS>(bytes, n);
      Floats value;
      if (GENERAL && p.values != INTEGER) {
        for (int l = 0; l < L; l++) value[l] = table[q[l]];
      } else {
        value = __builtin_convertvector(bits_of<Ints>(q), Floats);
      }
      if (GENERAL)
        value = (value - load<Floats>(zero + (at - from))) * s +
                load<Floats>(minimum + (at - from));
      else
        value = (value - all(float(1 << (BITS - 1)))) * s;
      if (ROUND) value = rounded(value);
      memcpy(out + n * L, &value, sizeof value);
    }
  }
}

inline Floats weights(const float* w) { return load<Floats>(w); }

inline Floats weights(const uint16_t* w) {
  return bits_of<Floats>(widened(w) << 16);
}

typedef Floats Sums[MOST_ROWS][OUTPUTS];

// sums[r][o] += w[o] * x[r], over n numbers. x is padded with zeros to full vectors, w is not.
// The outputs after these are fetched meanwhile if w is in memory. A prefetch reads nothing.
template <int R, int O, bool STREAM, class W>
inline void accumulate(const W* w, int64_t w_stride, const float* x, int64_t x_stride, int64_t n,
                       Floats (*sums)[OUTPUTS]) {
  Floats sum[R][O];
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) sum[r][o] = sums[r][o];
  auto add = [&](const W* at, int64_t stride, int64_t k) __attribute__((always_inline)) {
    Floats weight[O];
    for (int o = 0; o < O; o++) {
      weight[o] = weights(at + o * stride);
      if (STREAM) __builtin_prefetch(at + (o + OUTPUTS) * stride);
    }
    for (int r = 0; r < R; r++) {
      const Floats row = load<Floats>(x + r * x_stride + k);
      for (int o = 0; o < O; o++) sum[r][o] += weight[o] * row;
    }
  };
  int64_t k = 0;
  for (; k + L <= n; k += L) add(w + k, w_stride, k);
  if (k < n) {
    W left[O * L] = {};
    for (int o = 0; o < O; o++) memcpy(left + o * L, w + o * w_stride + k, sizeof(W) * (n - k));
    add(left, L, k);
  }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) sums[r][o] = sum[r][o];
}

// Calls f.run<R>(first row) for all rows, R at a time. Example, at most 4: 5 rows are 3 and 2.
template <class F>
inline void by_rows(int64_t rows, const F& f) {
  for (int64_t r = 0; r < rows;) {
    const int64_t parts = (rows - r + ROWS - 1) / ROWS, count = (rows - r + parts - 1) / parts;
    switch (count) {
      case 1: f.template run<1>(r); break;
      case 2: f.template run<2>(r); break;
      case 3: f.template run<3>(r); break;
      case 4: f.template run<4>(r); break;
    }
    r += count;
  }
}

template <int G, bool STREAM, class W>
struct Dense {
  const Product& p;
  const W* w;
  int64_t w_stride, first, n;
  Floats (*sums)[OUTPUTS];

  template <int R>
  inline void run(int64_t row) const {
    constexpr int O = G < outputs_at_once(R) ? G : outputs_at_once(R);
    for (int o = 0; o < G; o += O) {
      Floats (*to)[OUTPUTS] = reinterpret_cast<Floats (*)[OUTPUTS]>(&sums[row][o]);
      accumulate<R, O, STREAM>(w + o * w_stride, w_stride, p.arranged + row * p.stride + first, p.stride, n,
                       to);
    }
  }
};

// sums[r][o] += w[o] * x[r], over the bytes from..to-1, decoded in registers.
template <int R, int O, int BITS, bool ROUND, bool GENERAL>
inline void accumulate_packed(const Product& p, const float* values, int64_t output, int64_t from,
                              int64_t to, int64_t row, Floats (*sums)[OUTPUTS]) {
  constexpr int PLANES = 8 / BITS;
  using Decoder = typename Choice<BITS, ROUND, GENERAL>::Decoder;
  const int64_t width = p.block / PLANES, first = from / width;
  const int64_t count = (to - 1) / width + 1 - first;
  float room[O][3 * (VECTORS + 2)];
  Blocks blocks[O];
  const uint8_t* raw[O];
  Floats sum[R][O];
  for (int o = 0; o < O; o++) {
    blocks[o] = read_blocks<GENERAL>(p, output + o, first, count, room[o]);
    raw[o] = bytes_of(p, output + o);
  }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) sum[r][o] = sums[r][o];
  const float* x = p.arranged + row * p.stride + from * PLANES;
  const int64_t next = OUTPUTS * (p.inputs / PLANES);  // the outputs after these
  int64_t at = from;
  for (int64_t b = 0; b < count; b++) {
    int64_t end = (first + b + 1) * width;
    if (end > to) end = to;
    auto weight = [&](int o) __attribute__((always_inline)) {
      return GENERAL ? Decoder(blocks[o].scale[b], blocks[o].zero[b], blocks[o].minimum[b], values)
                     : Decoder(blocks[o].scale[b], 0, 0, values);
    };
    const Decoder weights[] = {weight(0), weight(O > 1 ? 1 : 0), weight(O > 2 ? 2 : 0),
                               weight(O > 3 ? 3 : 0)};
    for (; at < end; at += L, x += L * PLANES) {
      Words bytes[O];
      for (int o = 0; o < O; o++) {
        bytes[o] = widened(raw[o] + at);
        __builtin_prefetch(raw[o] + at + next);
      }
      for (int n = 0; n < PLANES; n++) {
        Floats found[O];
        for (int o = 0; o < O; o++) found[o] = weights[o](bytes[o], n);
        for (int r = 0; r < R; r++) {
          const Floats part = load<Floats>(x + r * p.stride + n * L);
          for (int o = 0; o < O; o++) sum[r][o] += found[o] * part;
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) sums[r][o] = sum[r][o];
}

template <int G, int BITS, bool ROUND, bool GENERAL>
struct Packed {
  const Product& p;
  const float* values;
  int64_t output, from, to;
  Floats (*sums)[OUTPUTS];

  template <int R>
  inline void run(int64_t row) const {
    constexpr int O = G < outputs_at_once(R) ? G : outputs_at_once(R);
    for (int o = 0; o < G; o += O) {
      Floats (*into)[OUTPUTS] = reinterpret_cast<Floats (*)[OUTPUTS]>(&sums[row][o]);
      accumulate_packed<R, O, BITS, ROUND, GENERAL>(p, values, output + o, from, to, row, into);
    }
  }
};

inline Four quarters(Floats x) {
  Four part[L / 4];
  memcpy(part, &x, sizeof x);
  Four sum = part[0];
  for (int i = 1; i < L / 4; i++) sum += part[i];
  return sum;
}

inline float total(Floats x) {
  const Four q = quarters(x);
  return (q[0] + q[1]) + (q[2] + q[3]);
}

inline void store(const Product& p, int64_t row, int64_t output, float value) {
  if (p.y_type == BF16)
    static_cast<uint16_t*>(p.y)[row * p.outputs + output] = to_bf16(value);
  else
    static_cast<float*>(p.y)[row * p.outputs + output] = value;
}

template <int G>
inline void finish(const Product& p, int64_t output, const Sums& sums) {
  for (int64_t r = 0; r < p.rows; r++)
    for (int o = 0; o < G; o++) store(p, r, output + o, total(sums[r][o]));
}

template <int G>
inline void clear(const Product& p, Sums& sums) {
  for (int64_t r = 0; r < p.rows; r++)
    for (int o = 0; o < G; o++) sums[r][o] = Floats{};
}

template <int G, class W>
void dense(const Product& p, int64_t output) {
  Sums sums;
  clear<G>(p, sums);
  const W* w = static_cast<const W*>(p.weight.data) + output * p.inputs;
  for (int64_t k = 0; k < p.inputs; k += DENSE_PANEL) {
    const int64_t n = p.inputs - k < DENSE_PANEL ? p.inputs - k : DENSE_PANEL;
    by_rows(p.rows, Dense<G, true, W>{p, w + k, p.inputs, k, n, sums});
  }
  finish<G>(p, output, sums);
}

template <int G, int BITS, bool ROUND, bool GENERAL>
void packed(const Product& p, const float* values, int64_t output) {
  constexpr int PLANES = 8 / BITS;
  const int64_t bytes = p.inputs / PLANES, width = p.block / PLANES;
  Sums sums;
  clear<G>(p, sums);
  // A vector lies in one block, and its weights are found without a table in memory. Decoding twice
  // takes less time than writing and reading what was decoded.
  const bool direct = p.rows <= 2 * ROWS && width % L == 0 &&
                      (p.values == INTEGER || (L == 16 && p.values == E2M1));
  if (direct) {
    for (int64_t from = 0; from < bytes; from += VECTORS * L) {
      const int64_t to = bytes - from < VECTORS * L ? bytes : from + VECTORS * L;
      by_rows(p.rows, Packed<G, BITS, ROUND, GENERAL>{p, values, output, from, to, sums});
    }
    return finish<G>(p, output, sums);
  }
  float decoded[G * PANEL];
  for (int64_t from = 0; from < bytes; from += PANEL / PLANES) {
    const int64_t to = bytes - from < PANEL / PLANES ? bytes : from + PANEL / PLANES;
    const int64_t n = (to - from + L - 1) / L * L * PLANES;
    for (int o = 0; o < G; o++)
      decode<BITS, ROUND, GENERAL>(p, values, output + o, from, to, decoded + o * PANEL);
    by_rows(p.rows, Dense<G, false, float>{p, decoded, PANEL, from * PLANES, n, sums});
  }
  finish<G>(p, output, sums);
}

template <int BITS, bool ROUND, bool GENERAL>
void outputs(const Product& p, const float* values, int64_t from, int64_t to) {
  int64_t o = from;
  for (; o + OUTPUTS <= to; o += OUTPUTS) packed<OUTPUTS, BITS, ROUND, GENERAL>(p, values, o);
  for (; o < to; o++) packed<1, BITS, ROUND, GENERAL>(p, values, o);
}

template <int BITS>
void packed_outputs(const Product& p, int64_t from, int64_t to) {
  static const Table e4m3 = tabulate(E4M3), e2m1 = tabulate(E2M1), integer = tabulate(INTEGER);
  const Table& table = p.values == E4M3 ? e4m3 : p.values == E2M1 ? e2m1 : integer;
  const float* values = BITS == 2 ? table.repeated : table.value;
  if (is_general(p))
    p.round ? outputs<BITS, true, true>(p, values, from, to)
            : outputs<BITS, false, true>(p, values, from, to);
  else
    p.round ? outputs<BITS, true, false>(p, values, from, to)
            : outputs<BITS, false, false>(p, values, from, to);
}

template <class W>
void dense_outputs(const Product& p, int64_t from, int64_t to) {
  int64_t o = from;
  for (; o + OUTPUTS <= to; o += OUTPUTS) dense<OUTPUTS, W>(p, o);
  for (; o < to; o++) dense<1, W>(p, o);
}

void multiply(const Product& p, int64_t from, int64_t to) {
  if (p.bits == 8) return packed_outputs<8>(p, from, to);
  if (p.bits == 4) return packed_outputs<4>(p, from, to);
  if (p.bits == 2) return packed_outputs<2>(p, from, to);
  if (p.weight.type == BF16) return dense_outputs<uint16_t>(p, from, to);
  dense_outputs<float>(p, from, to);
}

int64_t planes(const Product& p) { return p.bits ? 8 / p.bits : 1; }

int64_t stride(const Product& p) {
  const int64_t vector = L * planes(p);
  return (p.inputs + vector - 1) / vector * vector;
}

// Example, 2 lanes, 4 bits: the columns 0 1 2 3 | 4 5 6 7 become 0 2 1 3 | 4 6 5 7.
void arrange(const Product& p) {
  const int64_t n = planes(p);
  for (int64_t r = 0; r < p.rows; r++) {
    float* to = p.arranged + r * p.stride;
    if (n == 1) {
      widen(p.x, r * p.columns, p.columns, to);
      memset(to + p.columns, 0, sizeof(float) * (p.stride - p.columns));
      continue;
    }
    for (int64_t first = 0; first < p.stride; first += L * n) {
      float some[L * 4] = {};
      const int64_t left = p.columns - first, count = left < L * n ? left : L * n;
      if (count > 0) widen(p.x, r * p.columns + first, count, some);
      for (int64_t plane = 0; plane < n; plane++)
        for (int l = 0; l < L; l++) to[first + plane * L + l] = some[l * n + plane];
    }
  }
}

}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

extern const Kernels JOIN(kernels_, NAME);
const Kernels JOIN(kernels_, NAME) = {TEXT(NAME), stride, arrange, multiply};

}  // namespace jaxdraft
