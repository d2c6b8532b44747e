#include "emulator.h"

#include "cuda.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

// Every variable that is declared __shared__, if a library has any; see cuda_runtime.h.
extern "C" __attribute__((weak, visibility("hidden"))) uint8_t __start_cake_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) uint8_t __stop_cake_shared[];

namespace cake::emulator {

dim3 threadIdx, blockIdx, blockDim, gridDim;
int multiprocessors = 132;

namespace {

constexpr int kMostShared = 232448;  // bytes that a CTA of sm_90 can have
constexpr int kMargin = 1024;        // behind them, which nobody may write to
constexpr int kStackBytes = 256 << 10;
constexpr int kMostThreads = 1024, kMostNamed = 16;

alignas(1024) uint8_t memory[kMostShared + kMargin];

struct Copy {
  void* to;
  const void* from;  // null: zeros
  uint32_t bytes;

  void run() const {
    if (from) std::memcpy(to, from, bytes);
    else std::memset(to, 0, bytes);
  }
};

// Copies of one thread, in its order: numbered from the first that the thread started.
struct Copies {
  std::deque<Copy> open;
  std::deque<uint64_t> groups;  // for each that is committed and not waited for: the number behind its last copy
  uint64_t landed = 0;

  uint64_t started() const { return landed + open.size(); }
  void commit() { groups.push_back(started()); }
  void land(uint64_t end) {
    for (; landed < end; ++landed, open.pop_front()) open.front().run();
  }
  void wait(size_t pending) {
    for (; groups.size() > pending; groups.pop_front()) land(groups.front());
  }
};

// What ends a wait changes a counter: a fiber is ready as soon as its counter isn't what it saw.
struct Wait {
  enum Kind { kNone, kMbarrier, kNamed, kWarp } kind = kNone;
  uint32_t which = 0;
  const uint64_t* counter = nullptr;
  uint64_t seen = 0;

  bool over() const { return kind == kNone || *counter != seen; }
};

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool begun = false, done = false;
  Wait wait;
  Copies loads, stores;  // cp.async; bulk stores
};

struct Mbarrier {
  int count = 0, missing = 0;
  int64_t bytes = 0;  // announced and not landed
  uint64_t phase = 0;
};

struct Named {
  int threads = 0, arrived = 0;
  uint64_t turn = 0;
};

struct Product {
  float* d[32];
  uint32_t a[32][4];
  uint64_t a_descriptor, b_descriptor;
  int n;
  bool a_in_registers, a_transposed, b_transposed, accumulate;
};

struct Warp {
  const char* operation = nullptr;  // that lanes have come to
  void* operands[32];
  int arrived = 0;
  uint64_t turn = 0;
  std::deque<Product> products;
  std::deque<size_t> groups;  // products in each that is committed and not waited for
  size_t uncommitted = 0;
};

// A bulk load; or, of a thread's loads, the arrival that is due when those before `end` have landed.
struct Event {
  std::vector<Copy> copies;
  uint32_t bar;
  int thread;  // -1: a bulk load
  uint64_t end;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<int> order;  // of the warps
std::vector<Event> events;
std::map<uint32_t, Mbarrier> mbarriers;
Named named[kMostNamed];
const std::function<void()>* body;
int current = -1, shared_size;
jmp_buf scheduler;
std::string failure;
uint64_t schedule = 0;
std::mt19937 random_bits;

bool at_random() { return schedule % 2 != 0; }
bool chance(int of) { return at_random() && random_bits() % of == 0; }
int warp_of(int thread) { return thread / 32; }

// Ends the launch: what is left of it doesn't run.
void fail(const std::string& text) {
  if (failure.empty()) failure = text;
  if (current >= 0) _longjmp(scheduler, 1);
}

std::string place(uint32_t address) { return "byte " + std::to_string(address) + " of shared memory"; }

// ---- fibers ------------------------------------------------------------------------------------------------------

void leave() {
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

void wait_for(Wait::Kind kind, uint32_t which, const uint64_t& counter) {
  fibers[current].wait = {kind, which, &counter, counter};
  leave();
  fibers[current].wait = {};
}

void live() {
  for (;;) {
    (*body)();
    fibers[current].done = true;
    leave();
  }
}

// Runs a fiber until it waits or ends. The contexts of ucontext.h serve its start alone: switching them asks the operating
// system each time, which setjmp doesn't.
void resume(int thread) {
  current = thread;
  threadIdx = dim3(thread, 0, 0);
  if (_setjmp(scheduler) == 0) {
    Fiber& fiber = fibers[thread];
    if (fiber.begun) _longjmp(fiber.here, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
  }
  current = -1;
}

void prepare(int threads) {
  if (static_cast<int>(fibers.size()) < threads) fibers = std::vector<Fiber>(threads);
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    if (fiber.begun) continue;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, live, 0);
  }
}

// ---- mbarriers and copies ----------------------------------------------------------------------------------------

Mbarrier& mbarrier(uint32_t bar) {
  const auto found = mbarriers.find(bar);
  if (found == mbarriers.end()) {
    fail("no mbarrier was initialised at " + place(bar));
    return mbarriers[bar];
  }
  return found->second;
}

void complete(uint32_t bar, int arrivals, int64_t bytes) {
  Mbarrier& b = mbarrier(bar);
  b.missing -= arrivals;
  b.bytes -= bytes;
  if (b.missing < 0)
    return fail("the mbarrier at " + place(bar) + " got more arrivals in phase " + std::to_string(b.phase) +
                " than the " + std::to_string(b.count) + " that it counts");
  if (b.missing > 0 || b.bytes != 0) return;
  b.missing = b.count;
  ++b.phase;
}

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

void start(Copies& copies, const Copy& copy) {
  if (chance(2)) copy.run();
  else copies.open.push_back(copy);
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

// ---- the CTA -----------------------------------------------------------------------------------------------------

std::string description(const Wait& wait) {
  if (wait.kind == Wait::kMbarrier) {
    const Mbarrier& b = mbarriers.at(wait.which);
    const std::string bytes = b.bytes == 0 ? "" : " and lacks " + std::to_string(b.bytes) + " bytes of copies";
    return "the mbarrier at " + place(wait.which) + ", whose phase " + std::to_string(b.phase) + " has " +
           std::to_string(b.count - b.missing) + " of " + std::to_string(b.count) + " arrivals" + bytes;
  }
  if (wait.kind == Wait::kNamed) {
    const Named& b = named[wait.which];
    return "named barrier " + std::to_string(wait.which) + " with " + std::to_string(b.arrived) + " of " +
           std::to_string(b.threads) + " threads";
  }
  const Warp& warp = warps[wait.which];
  return std::string("all lanes of its warp to come to ") + warp.operation;
}

std::string deadlock() {
  std::string text = "deadlock:";
  std::string previous;
  for (size_t i = 0; i < fibers.size() && i < blockDim.x; ++i) {
    const std::string mine = fibers[i].done ? "" : description(fibers[i].wait);
    if (!mine.empty() && mine != previous) text += "\n  from thread " + std::to_string(i) + " on: waits for " + mine;
    if (mine.empty() && !previous.empty()) text += "\n  from thread " + std::to_string(i) + " on: done";
    previous = mine;
  }
  return text;
}

// What a CTA must not leave behind.
std::string leftovers() {
  for (unsigned i = 0; i < blockDim.x; ++i) {
    const std::string thread = "thread " + std::to_string(i);
    if (!fibers[i].loads.open.empty()) return thread + " ended before its cp.async had landed";
    if (!fibers[i].stores.open.empty()) return thread + " ended before its bulk stores had read shared memory";
  }
  for (size_t i = 0; i < warps.size(); ++i)
    if (!warps[i].products.empty()) return "warp " + std::to_string(i) + " ended before it waited for its wgmma";
  if (!events.empty()) return "the CTA ended before a copy to the mbarrier at " + place(events[0].bar) + " had landed";
  for (const auto& [bar, b] : mbarriers)
    if (b.missing != b.count || b.bytes != 0)
      return "the mbarrier at " + place(bar) + " was left with " + std::to_string(b.count - b.missing) + " of " +
             std::to_string(b.count) + " arrivals in phase " + std::to_string(b.phase);
  for (int i = 0; i < kMargin; ++i)
    if (memory[shared_size + i] != 0xff) return place(shared_size + i) + " was written to, which is behind its end";
  return "";
}

// Goes over the warps, once if they go on by turns, else up to the first that can. Returns whether a fiber ran, or one that
// could have was passed over.
bool turn() {
  bool alive = false;
  if (at_random()) std::shuffle(order.begin(), order.end(), random_bits);
  for (const int warp : order) {
    const int swap = at_random() ? random_bits() % 32 : 0;
    const bool passed = chance(4);
    for (bool again = true; again;) {
      again = false;
      for (int i = 0; i < 32; ++i) {
        const int thread = 32 * warp + (i ^ swap);
        if (fibers[thread].done || !fibers[thread].wait.over()) continue;
        alive = again = true;
        if (passed) break;
        resume(thread);
        if (!failure.empty()) return false;
      }
      if (passed || chance(2)) break;
    }
    if (alive && !at_random()) break;
  }
  return alive;
}

void run_cta(int threads) {
  mbarriers.clear();
  events.clear();
  for (Named& barrier : named) barrier = {};
  warps = std::vector<Warp>(threads / 32);
  order.resize(warps.size());
  std::iota(order.begin(), order.end(), 0);
  if (schedule) std::shuffle(order.begin(), order.end(), random_bits);
  std::memset(memory, 0xff, shared_size + kMargin);
  if (__start_cake_shared) std::memset(__start_cake_shared, 0xff, __stop_cake_shared - __start_cake_shared);
  for (Fiber& fiber : fibers) fiber.done = false, fiber.wait = {}, fiber.loads = {}, fiber.stores = {};
  for (;;) {
    if (!events.empty() && chance(2)) land(random_bits() % events.size());
    if (turn()) continue;
    if (!failure.empty()) return;
    if (events.empty()) break;
    land(at_random() ? random_bits() % events.size() : 0);
    if (!failure.empty()) return;
  }
  const bool ended = std::all_of(fibers.begin(), fibers.begin() + threads, [](const Fiber& f) { return f.done; });
  failure = ended ? leftovers() : deadlock();
}

}  // namespace

std::string launch(dim3 grid, int threads, int shared_bytes, const std::function<void()>& kernel) {
  if (threads % 32 != 0 || threads < 32 || threads > kMostThreads)
    return "a CTA must have whole warps and at most 1024 threads, got " + std::to_string(threads);
  if (shared_bytes > kMostShared)
    return "a CTA can have " + std::to_string(kMostShared) + " bytes of shared memory, got " +
           std::to_string(shared_bytes);
  failure.clear();
  random_bits.seed(static_cast<uint32_t>(schedule));
  body = &kernel;
  shared_size = shared_bytes;
  gridDim = grid;
  blockDim = dim3(threads);
  prepare(threads);
  const unsigned ctas = grid.x * grid.y * grid.z, first = schedule ? random_bits() % ctas : 0;
  for (unsigned i = 0; i < ctas && failure.empty(); ++i) {
    const unsigned cta = (first + i) % ctas;
    blockIdx = dim3(cta % grid.x, cta / grid.x % grid.y, cta / (grid.x * grid.y));
    run_cta(threads);
  }
  if (failure.empty()) return "";
  for (Fiber& fiber : fibers) fiber.begun = false;  // those that wait never go on
  return "CTA (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) +
         "): " + failure;
}

uint8_t* shared_memory() { return memory; }

uint8_t* shared(uint32_t address, uint32_t bytes, uint32_t alignment) {
  uint8_t* at = memory + static_cast<int32_t>(address);
  const bool dynamic = at >= memory && at + bytes <= memory + shared_size;
  const bool fixed = at >= __start_cake_shared && at + bytes <= __stop_cake_shared;
  if (!dynamic && !fixed) fail(std::to_string(bytes) + " bytes at " + place(address) + " lie outside of it");
  if (address % alignment != 0) fail(place(address) + " isn't aligned to " + std::to_string(alignment) + " bytes");
  return at;
}

int lane() { return current % 32; }

// ---- barriers ----------------------------------------------------------------------------------------------------

void named_barrier(int id, int threads) {
  if (id < 0 || id >= kMostNamed) return fail("there is no named barrier " + std::to_string(id));
  Named& barrier = named[id];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads)
    fail("threads came to named barrier " + std::to_string(id) + " for " + std::to_string(threads) + " and for " +
         std::to_string(barrier.threads));
  if (++barrier.arrived < threads) return wait_for(Wait::kNamed, id, barrier.turn);
  barrier.arrived = 0;
  ++barrier.turn;
}

void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  shared(bar, 8, 8);
  const int count = static_cast<int>(arrivals);
  mbarriers[bar] = {count, count, 0, 0};
}

void mbarrier_expect(uint32_t bar, uint32_t bytes) { mbarrier(bar).bytes += bytes; }

void mbarrier_arrive(uint32_t bar) { complete(bar, 1, 0); }

void mbarrier_wait(uint32_t bar, uint32_t parity) {
  Mbarrier& b = mbarrier(bar);
  while ((b.phase & 1) == parity) wait_for(Wait::kMbarrier, bar, b.phase);
}

// ---- copies ------------------------------------------------------------------------------------------------------

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

// The 16-byte groups of a box, each in shared memory and in the tensor, there null outside of it.
static std::vector<std::pair<uint8_t*, uint8_t*>> groups_of(uint32_t tile, const void* mapped, const int (&at)[4]) {
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

// How the launches to come are scheduled, and how many multiprocessors there are for them.
extern "C" __attribute__((visibility("default"))) void cake_emulator_set(uint64_t schedule, int multiprocessors) {
  cake::emulator::schedule = schedule;
  cake::emulator::multiprocessors = multiprocessors;
}
