// What XLA calls: it checks the arrays, and divides the outputs among the threads of XLA's pool.
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxdraft {

extern const Kernels kernels_plain;
#ifdef JAXDRAFT_X86
extern const Kernels kernels_avx2, kernels_avx512;
#endif

namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#ifdef JAXDRAFT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back(&kernels_avx512);
  if (avx2) found.push_back(&kernels_avx2);
#endif
  found.push_back(&kernels_plain);
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* found = chosen.load(std::memory_order_acquire);
  if (!found) chosen.store(found = usable()[0], std::memory_order_release);
  return *found;
}

constexpr int64_t WORTH_A_THREAD = 1 << 16;  // products of numbers

// Outputs are taken in parts, by the caller and by threads of the pool. The caller waits for parts
// that were begun and for nothing else, so a pool without a free thread delays nothing. A task that
// starts late finds no part left, and touches nothing but this.
struct Work {
  Product product;
  const Kernels* kernels;
  int64_t part, parts;
  std::atomic<int64_t> next{0}, done{0};

  void run() {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= parts) return;
      const int64_t from = i * part, to = std::min(from + part, product.outputs);
      kernels->multiply(product, from, to);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

inline void pause() {
#ifdef JAXDRAFT_X86
  __builtin_ia32_pause();
#endif
}

void run(ffi::ThreadPool& pool, Product& product) {
  const Kernels& k = kernels();
  thread_local std::vector<float> arranged;
  product.stride = k.stride(product);
  arranged.resize(product.rows * product.stride + 16);
  const auto address = reinterpret_cast<uintptr_t>(arranged.data());
  product.arranged = arranged.data() + (64 - address % 64) % 64 / sizeof(float);
  k.arrange(product);
  const int64_t amount = product.rows * product.inputs * product.outputs;
  const int64_t threads =
      std::max<int64_t>(1, std::min<int64_t>(pool.num_threads(), amount / WORTH_A_THREAD));
  if (threads == 1) return k.multiply(product, 0, product.outputs);
  auto work = std::make_shared<Work>();
  work->product = product;
  work->kernels = &k;
  // Four parts per thread even out threads that start late; a part is a multiple of four outputs.
  work->part = std::max<int64_t>(4, (product.outputs / (4 * threads) + 3) / 4 * 4);
  work->parts = (product.outputs + work->part - 1) / work->part;
  for (int64_t i = 1; i < threads; i++) pool.Schedule([work] { work->run(); });
  work->run();
  for (int64_t spins = 0; work->done.load(std::memory_order_acquire) < work->parts; spins++)
    spins < 4096 ? pause() : std::this_thread::yield();
}

Type type_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return F32;
    case ffi::BF16:
      return BF16;
    case ffi::F16:
      return F16;
    case ffi::U8:
      return U8;
    case ffi::S8:
      return S8;
    case ffi::F8E8M0FNU:
      return E8M0;
    default:
      return NONE;
  }
}

Array array_of(const ffi::AnyBuffer& buffer) {
  return {buffer.untyped_data(), type_of(buffer.element_type())};
}

ffi::Error wrong(const std::string& what) {
  return ffi::Error::InvalidArgument("jaxdraft: a product has wrong arguments: " + what);
}

bool is_shape(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  const auto found = buffer.dimensions();
  return found.size() == shape.size() && std::equal(shape.begin(), shape.end(), found.begin());
}

int64_t quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                 ffi::Result<ffi::AnyBuffer> y) {
  if (x.dimensions().size() != 2 || weight.dimensions().size() != 2) return wrong("ranks");
  Product p{};
  p.rows = x.dimensions()[0];
  p.inputs = p.columns = x.dimensions()[1];
  p.outputs = weight.dimensions()[0];
  if (p.rows > MOST_ROWS) return wrong("rows");
  if (!is_shape(weight, {p.outputs, p.inputs}) || !is_shape(*y, {p.rows, p.outputs}))
    return wrong("shapes");
  p.x = array_of(x);
  p.weight = array_of(weight);
  p.y = y->untyped_data();
  p.y_type = type_of(y->element_type());
  for (Type type : {p.x.type, p.weight.type, p.y_type})
    if (type != F32 && type != BF16) return wrong("types");
  if (p.rows && p.outputs) run(pool, p);
  return ffi::Error::Success();
}

// `parts` names the arrays after the scales: z zeros, m minima, c coarse, d coarse_minima.
ffi::Error packed(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::AnyBuffer scales, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> y,
                  int64_t bits, int64_t block, int64_t group, int64_t fine, int64_t values,
                  bool round, std::string_view parts) {
  if (x.dimensions().size() != 2 || weight.dimensions().size() != 3) return wrong("ranks");
  if ((bits != 2 && bits != 4 && bits != 8) || block < 1 || block * bits % 8 || group < 1 ||
      fine < 0 || values < 0 || values > 2 || (values == 1 && bits != 8) ||
      (values == 2 && bits != 4))
    return wrong("form");
  Product p{};
  p.bits = bits;
  p.block = block;
  p.group = group;
  p.fine = std::max<int64_t>(1, fine);
  p.values = Values(values);
  p.round = round;
  p.rows = x.dimensions()[0];
  p.columns = x.dimensions()[1];
  p.outputs = weight.dimensions()[0];
  p.blocks = weight.dimensions()[1];
  p.inputs = p.blocks * block;
  const int64_t groups = quotient(p.outputs, group);
  if (p.rows > MOST_ROWS) return wrong("rows");
  if (!is_shape(weight, {p.outputs, p.blocks, block * bits / 8}) ||
      !is_shape(scales, {groups, p.blocks}) || !is_shape(*y, {p.rows, p.outputs}) ||
      p.columns > p.inputs || more.size() != parts.size())
    return wrong("shapes");
  p.x = array_of(x);
  p.weight = array_of(weight);
  p.scales = array_of(scales);
  p.y = y->untyped_data();
  p.y_type = type_of(y->element_type());
  for (Type type : {p.x.type, p.y_type})
    if (type != F32 && type != BF16) return wrong("types");
  if (p.weight.type != U8 || p.scales.type == NONE) return wrong("types");
  for (size_t i = 0; i < parts.size(); i++) {
    auto buffer = more.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    const bool is_coarse = parts[i] == 'c' || parts[i] == 'd';
    if (!is_shape(*buffer, {groups, is_coarse ? quotient(p.blocks, p.fine) : p.blocks}))
      return wrong("shapes");
    const Array array = array_of(*buffer);
    if (array.type == NONE) return wrong("types");
    if (parts[i] == 'z')
      p.zeros = array;
    else if (parts[i] == 'm')
      p.minima = array;
    else if (parts[i] == 'c')
      p.coarse = array;
    else if (parts[i] == 'd')
      p.coarse_minima = array;
    else
      return wrong("parts");
  }
  if (p.rows && p.outputs) run(pool, p);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxdraft

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxdraft_dense, jaxdraft::dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxdraft_packed, jaxdraft::packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("fine")
                                  .Attr<int64_t>("values")
                                  .Attr<bool>("round")
                                  .Attr<std::string_view>("parts"));

// Returns the name of the i-th instruction set that this processor has, best first; null at the end.
extern "C" const char* jaxdraft_usable(int i) {
  const auto found = jaxdraft::usable();
  return i >= 0 && size_t(i) < found.size() ? found[i]->name : nullptr;
}

extern "C" const char* jaxdraft_chosen() { return jaxdraft::kernels().name; }

// Chooses an instruction set by name; false if this processor has no such.
extern "C" bool jaxdraft_choose(const char* name) {
  for (const auto* found : jaxdraft::usable())
    if (!std::strcmp(found->name, name)) {
      jaxdraft::chosen.store(found, std::memory_order_release);
      return true;
    }
  return false;
}
