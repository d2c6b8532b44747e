// What the instructions do that are more than a wait: copies, boxes of tensors, and what a warp does together.
#include "cta.h"

#include "cuda.h"

#include <utility>

namespace cake::emulator {

namespace {

void start(Copies& copies, const Copy& copy) {
  if (chance(2)) copy.run();
  else copies.open.push_back(copy);
}

// The 16-byte groups of a box, each in shared memory and in the tensor, there null outside of it.
std::vector<std::pair<uint8_t*, uint8_t*>> groups_of(uint32_t tile, const void* mapped, const int (&at)[4]) {
  TensorMap map;
  std::memcpy(&map, mapped, sizeof(map));
  if (reinterpret_cast<uintptr_t>(mapped) % 64 != 0) fail("a tensor map isn't aligned");
  uint32_t rows = 1;
  for (int i = 1; i < 4; ++i) rows *= map.box[i];
  shared(tile, rows * 128, 1024);
  std::vector<std::pair<uint8_t*, uint8_t*>> found;
  for (uint32_t row = 0; row < rows; ++row) {
    uint32_t rest = row;
    uint8_t* from = map.data;
    bool inside = true;
    for (int i = 1; i < 4; rest /= map.box[i++]) {
      const int64_t index = at[i] + static_cast<int64_t>(rest % map.box[i]);
      inside = inside && index >= 0 && index < static_cast<int64_t>(map.sizes[i]);
      from += index * static_cast<int64_t>(map.strides[i - 1]);
    }
    for (uint32_t group = 0; group < 8; ++group) {
      const int64_t column = at[0] + 8 * static_cast<int64_t>(group);
      const bool there = inside && column >= 0 && column + 8 <= static_cast<int64_t>(map.sizes[0]);
      found.push_back(
          {shared(tile + row * 128 + ((group ^ (row & 7)) << 4), 16, 16), there ? from + 2 * column : nullptr});
    }
  }
  return found;
}

// ---- products ----------------------------------------------------------------------------------------------------

float bf16(uint32_t bits) {
  const uint32_t wide = bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Eight values of an operand of wgmma that lie side by side: along K, or if it is transposed along M or N. `major` and `minor`
// are the first one's places along M or N and along K. `descriptor`: as in the PTX manual, with a swizzle of 128 bytes.
void load_group(float* values, uint64_t descriptor, bool transposed, int major, int minor) {
  const uint32_t first = (descriptor & 0x3fff) << 4, leading = ((descriptor >> 16) & 0x3fff) << 4,
                 stride = ((descriptor >> 32) & 0x3fff) << 4;
  uint32_t at = transposed ? first + major / 64 * leading + minor / 8 * stride + minor % 8 * 128 + major % 64 * 2
                           : first + major / 8 * stride + major % 8 * 128 + minor * 2;
  at ^= (at >> 3) & 0x70;
  uint16_t bits[8];
  std::memcpy(bits, shared(at, 16, 16), 16);
  for (int i = 0; i < 8; ++i) values[i] = bf16(bits[i]);
}

void run(const Product& p, int warp) {
  static float a[16][16], b[16][128], sum[16][128];
  float group[8];
  if (p.a_in_registers) {
    for (int lane = 0; lane < 32; ++lane)
      for (int j = 0; j < 8; ++j)
        a[lane / 4 + 8 * (j / 2 & 1)][2 * (lane % 4) + 8 * (j / 4) + j % 2] =
            bf16(p.a[lane][j / 2] >> 16 * (j % 2) & 0xffff);
  } else {
    const int row0 = 16 * (warp % 4);
    for (int i = 0; i < 32; ++i) {
      const int line = i / 2, first = i % 2 * 8;
      if (p.a_transposed) load_group(group, p.a_descriptor, true, row0 + first, line);
      else load_group(group, p.a_descriptor, false, row0 + line, first);
      for (int n = 0; n < 8; ++n) (p.a_transposed ? a[first + n][line] : a[line][first + n]) = group[n];
    }
  }
  const int columns = 2 * p.n;
  for (int major = 0; major < columns; major += p.b_transposed ? 8 : 1)
    for (int minor = 0; minor < 16; minor += p.b_transposed ? 1 : 8) {
      load_group(group, p.b_descriptor, p.b_transposed, major, minor);
      for (int n = 0; n < 8; ++n) (p.b_transposed ? b[minor][major + n] : b[minor + n][major]) = group[n];
    }
  const auto each = [&](auto use) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < p.n; ++i)
        use(p.d[lane][i], sum[lane / 4 + 8 * (i / 2 & 1)][8 * (i / 4) + 2 * (lane % 4) + i % 2]);
  };
  each([&](float& d, float& s) { s = p.accumulate ? d : 0.f; });
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < columns; ++n) sum[row][n] += a[row][k] * b[k][n];
  each([](float& d, float& s) { d = s; });
}

void finish(Warp& warp, size_t pending) {
  while (warp.groups.size() > pending) {
    for (size_t i = 0; i < warp.groups.front(); ++i) {
      run(warp.products.front(), static_cast<int>(&warp - warps.data()));
      warp.products.pop_front();
    }
    warp.groups.pop_front();
  }
}

// ---- what a warp does together -----------------------------------------------------------------------------------

// Waits for the other lanes; the last one to come runs `act` on the operands of all.
template <typename Operand, typename Act>
void together(const char* operation, Operand& operand, Act act) {
  Warp& warp = warps[warp_of(current)];
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation)
    fail("lanes of warp " + std::to_string(warp_of(current)) + " came to " + operation + " while others were at " +
         warp.operation);
  warp.operands[lane()] = &operand;
  if (++warp.arrived < 32) return wait_for(Wait::kWarp, warp_of(current), warp.turn);
  Operand* all[32];
  for (int i = 0; i < 32; ++i) all[i] = static_cast<Operand*>(warp.operands[i]);
  act(all, warp);
  warp.arrived = 0;
  ++warp.turn;
}

struct Matrices {
  uint32_t* r;
  uint32_t address;
};

// use(register, its half, element of shared memory) for the four 8 x 8 matrices of ldmatrix and stmatrix.
template <typename Use>
void each_element(Matrices* const* all, bool transposed, Use use) {
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int row = 0; row < 8; ++row) {
      uint8_t* at = shared(all[8 * matrix + row]->address, 16, 16);
      for (int column = 0; column < 8; ++column) {
        const int major = transposed ? column : row, minor = transposed ? row : column;
        use(all[4 * major + minor / 2]->r[matrix], minor % 2, at + 2 * column);
      }
    }
}

struct Fragments {
  float* d;
  float a[8], b[4];
};

// D[16][8] += A[16][kK] B[kK][8]; a register of a fragment holds kK / 8 values, neighbours along K.
template <int kK>
void multiply(Fragments* const* all) {
  constexpr int kPair = kK / 8;
  float a[16][kK], b[kK][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4 * kPair; ++i) {
      const int j = i / kPair, k = kPair * (lane % 4) + i % kPair;
      a[lane / 4 + 8 * (j & 1)][k + 4 * kPair * (j >> 1)] = all[lane]->a[i];
      if (j < 2) b[k + 4 * kPair * j][lane / 4] = all[lane]->b[i];
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < kK; ++k) all[lane]->d[i] += a[lane / 4 + 8 * (i >> 1)][k] * b[k][2 * (lane % 4) + (i & 1)];
}

}  // namespace

// ---- copies ------------------------------------------------------------------------------------------------------

void land(size_t index) {
  const Event event = events[index];
  events.erase(events.begin() + index);
  if (event.thread >= 0) {
    fibers[event.thread].loads.land(event.end);
    complete(event.bar, 1, 0);
  } else {
    uint32_t bytes = 0;
    for (const Copy& copy : event.copies) copy.run(), bytes += copy.bytes;
    complete(event.bar, 0, bytes);
  }
}

void copy_async(uint32_t to, const void* from, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("cp.async reads 16 bytes that aren't aligned");
  start(fibers[current].loads, {shared(to, 16, 16), valid ? from : nullptr, 16});
}

void copy_async_commit() { fibers[current].loads.commit(); }

void copy_async_wait(int pending) { fibers[current].loads.wait(pending); }

void copy_async_arrive(uint32_t bar) { events.push_back({{}, bar, current, fibers[current].loads.started()}); }

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) fail("a bulk load isn't aligned to 16 bytes");
  mbarrier(bar);
  events.push_back({{{shared(to, bytes, 16), from, bytes}}, bar, -1, 0});
}

void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0) fail("a bulk store isn't aligned to 16 bytes");
  start(fibers[current].stores, {to, shared(from, bytes, 16), bytes});
}

void tensor_load(uint32_t to, const void* map, const int (&at)[4], uint32_t bar) {
  mbarrier(bar);
  Event event{{}, bar, -1, 0};
  for (const auto& [here, there] : groups_of(to, map, at)) event.copies.push_back({here, there, 16});
  events.push_back(std::move(event));
}

void tensor_store(const void* map, const int (&at)[4], uint32_t from) {
  for (const auto& [here, there] : groups_of(from, map, at))
    if (there) start(fibers[current].stores, {there, here, 16});
}

void bulk_commit() { fibers[current].stores.commit(); }

void bulk_wait() { fibers[current].stores.wait(0); }

// ---- warps -------------------------------------------------------------------------------------------------------

void sync_warp() {
  int none = 0;
  together("__syncwarp", none, [](int**, Warp&) {});
}

uint32_t exchange(uint32_t value, int source) {
  struct Exchange {
    uint32_t in, out;
    int source;
  } mine = {value, 0, source};
  together("a shuffle", mine, [](Exchange** all, Warp&) {
    for (int i = 0; i < 32; ++i) all[i]->out = all[all[i]->source]->in;
  });
  return mine.out;
}

uint32_t ballot(bool predicate) {
  uint32_t votes = predicate;
  together("a vote", votes, [](uint32_t** all, Warp&) {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i) result |= *all[i] << i;
    for (int i = 0; i < 32; ++i) *all[i] = result;
  });
  return votes;
}

void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  Matrices mine = {r, address};
  together(transposed ? "ldmatrix.trans" : "ldmatrix", mine, [&](Matrices** all, Warp&) {
    each_element(all, transposed, [](uint32_t& x, int half, uint8_t* at) {
      uint16_t bits;
      std::memcpy(&bits, at, 2);
      x = half ? (x & 0xffffu) | uint32_t(bits) << 16 : (x & 0xffff0000u) | bits;
    });
  });
}

void store_matrices(const uint32_t (&r)[4], uint32_t address, bool transposed) {
  Matrices mine = {const_cast<uint32_t*>(r), address};
  together(transposed ? "stmatrix.trans" : "stmatrix", mine, [&](Matrices** all, Warp&) {
    each_element(all, transposed, [](uint32_t& x, int half, uint8_t* at) {
      const uint16_t bits = x >> 16 * half;
      std::memcpy(at, &bits, 2);
    });
  });
}

void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Fragments mine = {d, {}, {}};
  for (int i = 0; i < 8; ++i) mine.a[i] = bf16(a[i / 2] >> 16 * (i % 2) & 0xffff);
  for (int i = 0; i < 4; ++i) mine.b[i] = bf16((i < 2 ? b0 : b1) >> 16 * (i % 2) & 0xffff);
  together("mma of bf16", mine, [](Fragments** all, Warp&) { multiply<16>(all); });
}

void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments mine = {d, {}, {}};
  for (int i = 0; i < 6; ++i) {
    const uint32_t kept = (i < 4 ? a[i] : b[i - 4]) & 0xffffe000u;
    std::memcpy(i < 4 ? &mine.a[i] : &mine.b[i - 4], &kept, 4);
  }
  together("mma of tf32", mine, [](Fragments** all, Warp&) { multiply<8>(all); });
}

void warpgroup_multiply(float* d, int n, const uint32_t* a, uint64_t descriptor, uint64_t b, bool a_transposed,
                        bool b_transposed, bool accumulate) {
  if (b >> 62 != 1 || (!a && descriptor >> 62 != 1)) fail("the operands of wgmma must have swizzles of 128 bytes");
  struct Operands {
    float* d;
    const uint32_t* a;
  } mine = {d, a};
  together("wgmma", mine, [&](Operands** all, Warp& warp) {
    Product p = {{}, {}, descriptor, b, n, a != nullptr, a_transposed, b_transposed, accumulate};
    for (int i = 0; i < 32; ++i) {
      p.d[i] = all[i]->d;
      if (a) std::memcpy(p.a[i], all[i]->a, 16);
    }
    // Products add to the same sums in their order: those before this one come first.
    if (warp.products.empty() && chance(2)) return run(p, warp_of(current));
    warp.products.push_back(p);
    ++warp.uncommitted;
  });
}

void warpgroup_commit() {
  int none = 0;
  together("wgmma.commit_group", none, [](int**, Warp& warp) {
    warp.groups.push_back(warp.uncommitted);
    warp.uncommitted = 0;
  });
}

void warpgroup_wait(int pending) {
  int none = 0;
  together("wgmma.wait_group", none, [&](int**, Warp& warp) { finish(warp, pending); });
}

}  // namespace cake::emulator
