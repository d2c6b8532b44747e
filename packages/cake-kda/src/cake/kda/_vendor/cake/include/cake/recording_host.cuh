// Launches that are recorded once and played again by one call: cake.core.recording in Python makes what `record` takes.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <utility>
#include <vector>

#include "host.cuh"

namespace cake::host {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;
using tvm::ffi::String;

class Recording {
 public:
  // `arguments`: for each argument nothing, where it is passed on as it comes, or (name, whether its rows are loaded 16 bytes
  // at once, dtype code, bits, sizes...), which a tensor on `device` must have. `views`: contiguous tensors inside arguments,
  // (argument, first byte, dtype code, bits, sizes...). `calls`: (function, argument...): constants as they are,
  // ("argument", i) and ("view", i).
  Recording(DLDevice device, const Array<Array<Any>>& arguments, const Array<Array<Any>>& views,
            const Array<Array<Any>>& calls)
      : device_(device) {
    for (const Array<Any>& x : arguments) {
      Given given;
      if (x.size()) given.extents = Extents(x, 2), given.name = x[0].cast<String>(), given.rows = x[1].cast<bool>();
      given.checked = x.size() > 0;
      arguments_.push_back(std::move(given));
    }
    for (const Array<Any>& x : views) views_.push_back({x[0].cast<int64_t>(), x[1].cast<int64_t>(), Extents(x, 2)});
    for (const Array<Any>& x : calls) {
      Call call{x[0].cast<Function>(), {}};
      for (size_t i = 1; i < x.size(); ++i) call.operands.push_back(operand(x[i]));
      most_ = std::max(most_, call.operands.size());
      calls_.push_back(std::move(call));
    }
  }

  // Plays the calls, or returns the name of an argument that isn't what it must be.
  void operator()(PackedArgs args, Any* result) const {
    if (args.size() != static_cast<int>(arguments_.size()))
      TVM_FFI_THROW(ValueError) << "a recording of " << arguments_.size() << " arguments got " << args.size();
    for (int i = 0; i < args.size(); ++i)
      if (arguments_[i].checked && !fits(arguments_[i], args[i].cast<TensorView>())) {
        *result = String(otherwise(arguments_[i], args[i].cast<TensorView>()));
        return;
      }
    std::vector<DLTensor> views(views_.size());
    for (size_t i = 0; i < views_.size(); ++i) {
      const Extents& x = views_[i].extents;
      auto* base = static_cast<char*>(args[views_[i].argument].cast<TensorView>().data_ptr());
      views[i] = {base + views_[i].first_byte,
                  device_,
                  static_cast<int>(x.sizes.size()),
                  x.dtype,
                  const_cast<int64_t*>(x.sizes.data()),
                  const_cast<int64_t*>(x.strides.data()),
                  0};
    }
    std::vector<AnyView> packed(most_);
    for (const Call& call : calls_) {
      for (size_t i = 0; i < call.operands.size(); ++i) {
        const Operand& x = call.operands[i];
        packed[i] = x.from == kConstant   ? AnyView(x.constant)
                    : x.from == kArgument ? args[x.index]
                                          : AnyView(&views[x.index]);
      }
      Any none;
      call.function.CallPacked(packed.data(), static_cast<int>(call.operands.size()), &none);
    }
  }

 private:
  enum From { kConstant, kArgument, kView };
  struct Extents {
    DLDataType dtype{};
    std::vector<int64_t> sizes, strides;

    Extents() = default;
    Extents(const Array<Any>& x, size_t first) {
      dtype = {static_cast<uint8_t>(x[first].cast<int64_t>()), static_cast<uint8_t>(x[first + 1].cast<int64_t>()), 1};
      for (size_t i = first + 2; i < x.size(); ++i) sizes.push_back(x[i].cast<int64_t>());
      strides.assign(sizes.size(), 1);
      for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
    }
  };
  struct Given {
    bool checked = false, rows = false;
    std::string name;
    Extents extents;
  };
  struct Piece {
    int64_t argument, first_byte;
    Extents extents;
  };
  struct Operand {
    From from;
    int64_t index;
    Any constant;
  };
  struct Call {
    Function function;
    std::vector<Operand> operands;
  };

  static Operand operand(const Any& x) {
    const auto place = x.try_cast<Array<Any>>();
    if (!place.has_value()) return {kConstant, 0, x};
    const bool view = (*place)[0].cast<String>() == "view";
    return {view ? kView : kArgument, (*place)[1].cast<int64_t>(), nullptr};
  }

  bool fits(const Given& wanted, const TensorView& x) const {
    const Extents& extents = wanted.extents;
    bool same = x.ndim() == static_cast<int>(extents.sizes.size()) && x.dtype().code == extents.dtype.code &&
                x.dtype().bits == extents.dtype.bits && x.device().device_type == device_.device_type &&
                x.device().device_id == device_.device_id;
    for (int i = 0; same && i < x.ndim(); ++i) same = x.size(i) == extents.sizes[i];
    if (same && x.ndim() == 1) return x.size(0) <= 1 || x.stride(0) == 1;
    if (!same || !wanted.rows) return same;
    same = x.stride(x.ndim() - 1) == 1 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
    for (int i = 0; same && i + 1 < x.ndim(); ++i) same = x.stride(i) * (extents.dtype.bits / 8) % 16 == 0;
    return same;
  }

  std::string otherwise(const Given& wanted, const TensorView& x) const {
    return wanted.name + " must be " + text(wanted.extents.dtype, wanted.extents.sizes, device_) +
           (wanted.rows ? " in rows of 16 bytes" : "") + ", got " +
           text(x.dtype(), {x.shape().begin(), x.shape().end()}, x.device());
  }

  static std::string text(DLDataType dtype, const std::vector<int64_t>& sizes, DLDevice device) {
    std::string shape;
    for (int64_t n : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
    return tvm::ffi::DLDataTypeToString(dtype) + " [" + shape + "] on device " + std::to_string(device.device_type) +
           ":" + std::to_string(device.device_id);
  }

  DLDevice device_;
  std::vector<Given> arguments_;
  std::vector<Piece> views_;
  std::vector<Call> calls_;
  size_t most_ = 0;
};

// A function that plays the calls, in order, for the arguments that it is given, and returns nothing. All of them are checked
// before the first call; if one isn't what it must be, it returns what is wrong in place of making any.
inline Function record(int64_t device_type, int64_t device_id, Array<Array<Any>> arguments, Array<Array<Any>> views,
                       Array<Array<Any>> calls) {
  const DLDevice device{static_cast<DLDeviceType>(device_type), static_cast<int32_t>(device_id)};
  return Function::FromPacked([recording = Recording(device, arguments, views, calls)](PackedArgs args, Any* result) {
    recording(args, result);
  });
}

}  // namespace cake::host
