// Products of a few rows with a matrix of 32, 16, 8, 4 or 2 bits per number. The arrays are those of
// jaxdraft/nn/packed.py. No standard library here: this file is compiled several times, for different
// instruction sets, and an inline function of the library would be kept in one of its forms only.
#pragma once
#include <stdint.h>

namespace jaxdraft {

enum Type : int32_t { NONE, F32, BF16, F16, U8, S8, E8M0 };
enum Values : int32_t { INTEGER, E4M3, E2M1 };

constexpr int64_t MOST_ROWS = 32;

struct Array {
  const void* data = nullptr;
  Type type = NONE;
};

struct Product {
  int64_t rows, inputs, outputs;  // inputs: numbers of a stored row
  int64_t bits;                   // of a packed value; 0: the matrix is dense
  Values values;
  bool round;  // numbers of a packed matrix are rounded to bfloat16
  int64_t block, blocks, group, fine;
  Array weight, scales, zeros, minima, coarse, coarse_minima;
  Array x;          // [rows, columns]
  int64_t columns;  // at most inputs
  float* arranged;  // [rows, stride]: x in the order in which numbers of the matrix are decoded
  int64_t stride;
  void* y;  // [rows, outputs]
  Type y_type;
};

struct Kernels {
  const char* name;
  // Numbers of a row of `arranged`.
  int64_t (*stride)(const Product&);
  // Fills `arranged`.
  void (*arrange)(const Product&);
  // Computes the outputs from..to-1.
  void (*multiply)(const Product&, int64_t from, int64_t to);
};

}  // namespace jaxdraft
