// A device for tests where there is no GPU. Its memory is the host's and its kernels are the CPU's, but PyTorch
// treats it as an accelerator: tensors on it and on the host do not mix, and copies between the two and reads of
// numbers, which make the host wait for a GPU, are counted, or refused.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

constexpr auto KEY = c10::DispatchKey::PrivateUse1;
const c10::Device DEVICE(at::kPrivateUse1, 0);

std::map<std::string, int64_t> waits;
bool may_wait = true;

void wait(const std::string& why) {
  TORCH_CHECK(may_wait, "the host waits: ", why);
  waits[why]++;
}

// ---- memory, streams, random numbers ----------------------------------------------------------------------

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &release, DEVICE};
  }
  static void release(void* data) {
    if (data) c10::free_cpu(data);
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(at::kPrivateUse1, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = at::kPrivateUse1;
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceType type() const override { return at::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(KEY);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::make_generator<Generator>();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
};

// ---- tensors ----------------------------------------------------------------------------------------------

IntArrayRef ints(SymIntArrayRef sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); }

Tensor empty(SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(ints(size), &memory, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device>, optional<bool>) {
  const auto keys = c10::DispatchKeySet(KEY);
  return at::detail::empty_strided_generic(ints(size), ints(stride), &memory, keys, c10::dtype_or_default(dtype));
}

// The same numbers as a tensor of the host, and back.
Tensor on_host(const Tensor& x) {
  if (!x.defined() || x.is_cpu()) return x;
  const auto length = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  const auto all = at::from_blob(x.storage().mutable_data(), {length}, x.options().device(at::kCPU));
  return at::as_strided(all, x.sizes(), x.strides(), x.storage_offset());
}

Tensor on_device(const Tensor& x) {
  if (!x.defined()) return x;
  const auto y = at::empty_strided(x.sizes(), x.strides(), x.options().device(DEVICE));
  on_host(y).copy_(x);
  return y;
}

Tensor as_strided(const Tensor& x, SymIntArrayRef size, SymIntArrayRef stride, optional<c10::SymInt> offset) {
  const auto at = offset ? optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(x, ints(size), ints(stride), at);
}

Tensor view(const Tensor& x, SymIntArrayRef size) { return at::native::view(x, ints(size)); }

Tensor reshape_alias(const Tensor& x, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(x, ints(size), ints(stride));
}

const Tensor& resize(const Tensor& x, SymIntArrayRef size, optional<at::MemoryFormat>) {
  const auto storage = x.storage();
  const auto bytes = (c10::multiply_integers(ints(size)) + x.storage_offset()) * x.element_size();
  if (storage.nbytes() < bytes) {
    auto data = memory.allocate(bytes);
    std::memcpy(data.mutable_get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  x.unsafeGetTensorImpl()->set_sizes_contiguous(ints(size));
  return x;
}

Tensor& set(Tensor& x, const c10::Storage& storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, optional<int64_t>(offset));
  return x;
}

Tensor& set_view(Tensor& x, at::Storage storage, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  return set(x, storage, offset.guard_int(__FILE__, __LINE__), ints(size), ints(stride));
}

Tensor& set_storage(Tensor& x, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / x.element_size());
  return set(x, storage, 0, IntArrayRef({length}), IntArrayRef({1}));
}

Tensor& set_tensor(Tensor& x, const Tensor& y) {
  return set(x, y.storage(), y.storage_offset(), y.sizes(), y.strides());
}

// A copy from the host that need not wait is staged; one to the host is not safe before the device is done.
Tensor copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.is_privateuseone() && to.is_cpu()) wait("copy to the host");
  if (from.is_cpu() && to.is_privateuseone() && !non_blocking) wait("copy from the host");
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar number(const Tensor& x) {
  wait("a number is read");
  return at::_local_scalar_dense(on_host(x));
}

// ---- operations -------------------------------------------------------------------------------------------

Tensor convolution(const Tensor& x, const Tensor& w, const optional<Tensor>& b, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   c10::SymInt groups) {
  const auto bias = b ? optional<Tensor>(on_host(*b)) : std::nullopt;
  return on_device(at::convolution_symint(on_host(x), on_host(w), bias, stride, padding, dilation, transposed,
                                          output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w,
                                                        SymIntArrayRef stride, SymIntArrayRef padding,
                                                        SymIntArrayRef dilation, bool transposed,
                                                        SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  const std::vector<c10::SymInt> bias{transposed ? w.sym_size(1) * groups : w.sym_size(0)};
  const auto [dx, dw, db] =
      at::convolution_backward_symint(on_host(g), on_host(x), on_host(w), SymIntArrayRef(bias), stride, padding,
                                      dilation, transposed, output_padding, groups, wanted);
  return {on_device(dx), on_device(dw), on_device(db)};
}

const std::set<std::string> INDEXING = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};
const std::set<std::string> OF_UNKNOWN_SIZE = {"aten::nonzero",       "aten::masked_select",
                                               "aten::_unique2",      "aten::unique_dim",
                                               "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
                                               "aten::bincount",      "aten::equal"};

// Whatever has no kernel above runs on the host's tensors, in place where it is in place.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  const bool indexing = INDEXING.count(name);
  if (OF_UNKNOWN_SIZE.count(name)) wait(name);

  bool on_device_too = false;
  std::string elsewhere;
  const auto moved = [&](const Tensor& x) {
    if (!x.defined()) return x;
    on_device_too = on_device_too || x.is_privateuseone();
    if (x.is_cpu() && x.dim() > 0) elsewhere = name;
    return on_host(x);
  };
  std::vector<Tensor> given(count);
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      given[i] = value.toTensor();
      const auto* alias = schema.arguments()[i].alias_info();
      const bool is_empty_result = alias && alias->isWrite() && given[i].numel() == 0;
      value = moved(given[i]);
      if (is_empty_result) value = at::empty(given[i].sizes(), given[i].options().device(at::kCPU));
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(moved(x));
      value = c10::IValue(c10::List<Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<optional<Tensor>> list;
      for (const auto& x : value.toOptionalTensorVector()) {
        if (indexing && x && x->defined() && x->scalar_type() == at::kBool) wait(name + " by a mask");
        if (indexing && x && x->defined() && x->is_cpu()) wait(name + " by places on the host");
        list.push_back(x ? optional<Tensor>(on_host(*x)) : x);
      }
      value = c10::IValue(list);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device() == DEVICE, "a generator on the host: ", name);
      auto generator = at::detail::createCPUGenerator();
      generator.set_state(value.toGenerator().get_state());
      value = generator;
    }
  }
  TORCH_CHECK(!on_device_too || elsewhere.empty(), "Expected all tensors to be on the same device: ", elsewhere);

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  const auto& returns = schema.returns();
  const auto results = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& value = (*stack)[results + i];
    const auto* alias = returns[i].alias_info();
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(on_device(x));
      value = c10::IValue(c10::List<Tensor>(list));
    } else if (value.isTensor() && !alias) {
      value = on_device(value.toTensor());
    } else if (value.isTensor()) {
      TORCH_CHECK(alias->isWrite(), "a view without a kernel of its own: ", name);
      const auto found = value.toTensor();
      for (size_t j = 0; j < count; j++) {
        const auto* own = schema.arguments()[j].alias_info();
        if (!own || !(*own == *alias)) continue;
        if (given[j].sizes() != found.sizes()) {
          given[j].resize_(found.sizes());
          on_host(given[j]).copy_(found);
        }
        value = given[j];
      }
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// What CUDA's autocast does with the operations of the tests.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(group_norm, fp32)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("waits", [] { return waits; });
  m.def("forget", [] { waits.clear(); });
  m.def("allow", [](bool allowed) { may_wait = allowed; });
}
