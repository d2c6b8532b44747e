// Launches that are recorded once and played again by one call: cake.core.recording in Python makes what `record` takes.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <memory>
#include <mutex>
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

// Host entries run where tensors are first laid out as they are, with stand-ins for them, and leave their launches here.
// Every call that is laid out alike makes those launches, with its own addresses.
class Recording {
 public:
  // `arguments`: for each argument nothing, where it is passed on as it comes, or (name, whether its rows are loaded 16 bytes
  // at once, dtype code, bits, sizes...), which a tensor on `device` must have. `views`: contiguous tensors inside arguments,
  // (argument, first byte, dtype code, bits, sizes...). `calls`: (function, argument...): constants as they are,
  // ("argument", i) and ("view", i). The last argument is the handle of a stream.
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
      calls_.push_back(std::move(call));
    }
  }

  // Plays the calls, or returns the name of an argument that isn't what it must be.
  void operator()(PackedArgs args, Any* result) {
    const int count = static_cast<int>(arguments_.size());
    if (args.size() != count)
      TVM_FFI_THROW(ValueError) << "a recording of " << count << " arguments got " << args.size();
    std::vector<const DLTensor*> tensors(count - 1);
    for (int i = 0; i < count - 1; ++i)
      if (const auto x = args[i].try_cast<DLTensor*>()) tensors[i] = *x;
    std::vector<int64_t> layout = layout_of(tensors);
    std::shared_ptr<const Kept> kept = found(layout);
    if (!kept) {
      for (int i = 0; i < count - 1; ++i)
        if (arguments_[i].checked && !fits(arguments_[i], args[i].cast<TensorView>())) {
          *result = String(otherwise(arguments_[i], args[i].cast<TensorView>()));
          return;
        }
      kept = keep(args, tensors, std::move(layout));
    }
    DeviceGuard guard(device_.device_id);
    const cudaStream_t stream = stream_of(args[count - 1].cast<int64_t>());
    std::vector<Block> arguments(kept->most);
    for (const KeptLaunch& x : kept->launches) {
      std::copy(x.launch.arguments.begin(), x.launch.arguments.end(), arguments.begin());
      for (const Address& a : x.addresses)
        arguments[a.word / kBlockWords].words[a.word % kBlockWords] = address(*tensors[a.argument]) + a.offset;
      x.launch.run(x.launch, arguments.data(), stream);
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
  // A word of a launch's arguments that is an address, `offset` bytes behind that of an argument.
  struct Address {
    uint32_t word, argument;
    int64_t offset;
  };
  struct KeptLaunch {
    Launch launch;
    std::vector<Address> addresses;
  };
  struct Kept {
    std::vector<int64_t> layout;
    std::vector<KeptLaunch> launches;
    size_t most = 0;  // blocks of arguments
  };

  static constexpr uint64_t kAlignment = 16, kShift = 64;
  static constexpr size_t kMostKept = 8;  // layouts; the oldest is forgotten

  static uint64_t address(const DLTensor& x) { return reinterpret_cast<uint64_t>(x.data) + x.byte_offset; }
  // A wrapper of other tensors may have elements and no memory: none of the layouts that are kept is like it.
  static int64_t residue(const DLTensor& x) {
    const bool elements = std::find(x.shape, x.shape + x.ndim, 0) == x.shape + x.ndim;
    return !x.data && elements ? -1 : static_cast<int64_t>(address(x) % kAlignment);
  }

  static Operand operand(const Any& x) {
    const auto place = x.try_cast<Array<Any>>();
    if (!place.has_value()) return {kConstant, 0, x};
    const bool view = (*place)[0].cast<String>() == "view";
    return {view ? kView : kArgument, (*place)[1].cast<int64_t>(), nullptr};
  }

  // All that entries see of tensors but for their addresses, and of those how they are aligned.
  static std::vector<int64_t> layout_of(const std::vector<const DLTensor*>& tensors) {
    std::vector<int64_t> all;
    all.reserve(13 * tensors.size());
    for (const DLTensor* x : tensors) {
      all.push_back(x ? x->ndim : -1);
      if (!x) continue;
      for (int64_t value : {int64_t(x->dtype.code), int64_t(x->dtype.bits), int64_t(x->device.device_type),
                            int64_t(x->device.device_id), residue(*x)})
        all.push_back(value);
      all.insert(all.end(), x->shape, x->shape + x->ndim);
      all.insert(all.end(), x->strides, x->strides + x->ndim);
    }
    return all;
  }

  std::shared_ptr<const Kept> found(const std::vector<int64_t>& layout) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& kept : kept_)
      if (kept->layout == layout) return kept;
    return nullptr;
  }

  // What the entries launch for stand-ins of the tensors, each `shift` bytes from where it would be.
  Launches launches_of(PackedArgs args, const std::vector<const DLTensor*>& tensors, uint64_t shift) const {
    std::vector<DLTensor> stands(tensors.size()), views(views_.size());
    std::vector<AnyView> given(args.data(), args.data() + args.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i]) continue;
      stands[i] = *tensors[i];
      stands[i].data = reinterpret_cast<void*>(nowhere(i) + residue(*tensors[i]) + shift);
      stands[i].byte_offset = 0;
      given[i] = AnyView(&stands[i]);
    }
    Launches launches;
    given.back() = AnyView(handle_of(launches));
    for (size_t i = 0; i < views_.size(); ++i) {
      const Extents& x = views_[i].extents;
      views[i] = {static_cast<char*>(stands[views_[i].argument].data) + views_[i].first_byte,
                  device_,
                  static_cast<int>(x.sizes.size()),
                  x.dtype,
                  const_cast<int64_t*>(x.sizes.data()),
                  const_cast<int64_t*>(x.strides.data()),
                  0};
    }
    for (const Call& call : calls_) {
      std::vector<AnyView> packed;
      for (const Operand& x : call.operands)
        packed.push_back(x.from == kConstant   ? AnyView(x.constant)
                         : x.from == kArgument ? given[x.index]
                                               : AnyView(&views[x.index]));
      Any none;
      call.function.CallPacked(packed.data(), static_cast<int>(packed.size()), &none);
    }
    return launches;
  }

  std::shared_ptr<const Kept> keep(PackedArgs args, const std::vector<const DLTensor*>& tensors,
                                   std::vector<int64_t> layout) {
    const auto kept = std::make_shared<Kept>();
    kept->layout = std::move(layout);
    // An address moves with its stand-in; the rest of one that was left between an argument's members doesn't move its data.
    Launches launches = launches_of(args, tensors, 0), moved = launches_of(args, tensors, kShift);
    for (size_t n = 0; n < launches.size(); ++n) {
      KeptLaunch made{std::move(launches[n]), {}};
      const std::vector<Block>& here = made.launch.arguments;
      const std::vector<Block>& there = moved.at(n).arguments;
      for (uint32_t i = 0; i < kBlockWords * here.size(); ++i) {
        const uint64_t word = here[i / kBlockWords].words[i % kBlockWords];
        const uint32_t argument = word >> 40 & 0xff;
        if (!is_nowhere(word) || there.at(i / kBlockWords).words[i % kBlockWords] != word + kShift ||
            argument >= tensors.size() || !tensors[argument])
          continue;
        made.addresses.push_back(
            {i, argument, static_cast<int64_t>(word - nowhere(argument) - residue(*tensors[argument]))});
      }
      kept->most = std::max(kept->most, here.size());
      kept->launches.push_back(std::move(made));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_.size() == kMostKept) kept_.erase(kept_.begin());
    kept_.push_back(kept);
    return kept;
  }

  bool fits(const Given& wanted, const TensorView& x) const {
    const Extents& extents = wanted.extents;
    if (!x.data_ptr() && x.numel()) return false;
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
           text(x.dtype(), {x.shape().begin(), x.shape().end()}, x.device()) + (x.data_ptr() ? "" : " without memory");
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
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Kept>> kept_;
};

// A function that plays the calls, in order, for the arguments that it is given, and returns nothing. All of them are checked
// before the first call; if one isn't what it must be, it returns what is wrong in place of making any.
inline Function record(int64_t device_type, int64_t device_id, Array<Array<Any>> arguments, Array<Array<Any>> views,
                       Array<Array<Any>> calls) {
  const DLDevice device{static_cast<DLDeviceType>(device_type), static_cast<int32_t>(device_id)};
  const auto recording = std::make_shared<Recording>(device, arguments, views, calls);
  return Function::FromPacked([recording](PackedArgs args, Any* result) { (*recording)(args, result); });
}

}  // namespace cake::host
