// What PyTorch's C++ side asks of CUDA, answered without any: two devices, of which each thread has a current one.
// Loaded with RTLD_GLOBAL before torch, so that `getAccelerator` takes the place of torch's own.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

constexpr c10::DeviceIndex DEVICES = 2;
static thread_local c10::DeviceIndex current = 0;

namespace at {
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return kCUDA; }
} // namespace accelerator

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at

struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current = device.index();
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
};

extern "C" void install() {
  static const Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(&guard);
}

// Makes `device` the thread's current one and tells which one was; a negative number only asks.
extern "C" int exchange(int device) {
  int before = current;
  if (device >= 0) current = static_cast<c10::DeviceIndex>(device);
  return before;
}
