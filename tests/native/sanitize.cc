// Runs products of many shapes over buffers of exactly their size, under sanitizers, and compares
// them with plain loops. Exit status 4: the processor lacks the instructions.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels.h"

using namespace jaxdraft;

namespace jaxdraft {
extern const Kernels KERNELS;
}

template <class T>
struct Exact {  // from malloc, so that the first byte past it is poisoned
  T* data;
  explicit Exact(size_t n) : data(static_cast<T*>(std::malloc(n * sizeof(T)))) {}
  ~Exact() { std::free(data); }
};

static std::mt19937 random_bits(0);

static int64_t pick(int64_t from, int64_t to) { return from + random_bits() % (to - from + 1); }

static bool run(int64_t bits, int64_t block, int64_t blocks, int64_t rows, int64_t outputs,
                bool zeros, bool minima) {
  Product p{};
  p.rows = rows;
  p.outputs = outputs;
  p.bits = bits;
  p.block = block;
  p.blocks = blocks;
  p.group = 1;
  p.fine = 1;
  p.inputs = block * blocks;
  p.columns = bits ? p.inputs - pick(0, block - 1) : p.inputs;
  Exact<float> x(rows * p.columns), y(rows * outputs), scales(outputs * blocks);
  Exact<float> dense(bits ? 0 : outputs * p.inputs);
  Exact<uint8_t> raw(bits ? outputs * p.inputs * bits / 8 : 0);
  Exact<uint8_t> zero(outputs * blocks), minimum(outputs * blocks);
  for (int64_t i = 0; i < rows * p.columns; i++) x.data[i] = float(pick(-4, 4));
  for (int64_t i = 0; i < outputs * blocks; i++) {
    scales.data[i] = float(pick(1, 3));
    zero.data[i] = uint8_t(pick(0, 3));
    minimum.data[i] = uint8_t(pick(0, 3));
  }
  std::vector<float> w(outputs * p.inputs);
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t k = 0; k < p.inputs; k++) {
      const int64_t at = o * p.inputs + k, b = o * blocks + k / block;
      if (!bits) {
        w[at] = dense.data[at] = float(pick(-8, 8));
        continue;
      }
      const int64_t q = pick(0, (1 << bits) - 1), bit = at * bits;
      uint8_t& byte = raw.data[bit / 8];
      if (bit % 8 == 0) byte = 0;
      byte |= uint8_t(q << bit % 8);
      const int64_t offset = zeros ? zero.data[b] : minima ? 0 : 1 << (bits - 1);
      w[at] = float(q - offset) * scales.data[b] + (minima ? minimum.data[b] : 0);
    }
  p.weight = bits ? Array{raw.data, U8} : Array{dense.data, F32};
  if (bits) p.scales = {scales.data, F32};
  if (bits && zeros) p.zeros = {zero.data, U8};
  if (bits && minima) p.minima = {minimum.data, U8};
  p.x = {x.data, F32};
  p.y = y.data;
  p.y_type = F32;
  p.stride = KERNELS.stride(p);
  Exact<float> arranged(rows * p.stride);
  p.arranged = arranged.data;
  KERNELS.arrange(p);
  const int64_t half = pick(0, outputs);
  KERNELS.multiply(p, 0, half);
  KERNELS.multiply(p, half, outputs);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < outputs; o++) {
      double sum = 0, size = 1;
      for (int64_t k = 0; k < p.columns; k++) {
        const double part = double(w[o * p.inputs + k]) * x.data[r * p.columns + k];
        sum += part;
        size += std::fabs(part);
      }
      if (std::fabs(y.data[r * outputs + o] - sum) > 1e-5 * size) {
        std::printf("bits %d block %d blocks %d rows %d: %g, not %g\n", int(bits), int(block),
                    int(blocks), int(rows), y.data[r * outputs + o], sum);
        return false;
      }
    }
  return true;
}

int main() {
#if LANES == 16
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return 4;
#elif LANES == 8
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 4;
#endif
  const int64_t blocks_of[] = {8, 16, 24, 32, 64, 128, 576, 4104};
  for (int i = 0; i < 3000; i++) {
    const int64_t bits[] = {0, 2, 4, 8}, block = blocks_of[pick(0, 7)];
    const int64_t blocks = pick(1, block > 500 ? 3 : 1500 / block), kind = bits[pick(0, 3)];
    // Dense rows have any length.
    const int64_t width = kind ? block : 1, count = kind ? blocks : pick(1, 5000);
    if (!run(kind, width, count, pick(1, 32), pick(1, 9), pick(0, 1), pick(0, 1))) return 1;
  }
}
