// The threads of a CTA and what they wait for: fibers, barriers, the schedule, launches.
#include "cta.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

// Every variable that is declared __shared__, if a library has any; see cuda_runtime.h.
extern "C" __attribute__((weak, visibility("hidden"))) uint8_t __start_cake_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) uint8_t __stop_cake_shared[];

namespace cake::emulator {

dim3 threadIdx, blockIdx, blockDim, gridDim;
int multiprocessors = 132;

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Event> events;
int current = -1;

namespace {

constexpr int kMostShared = 232448;  // bytes that a CTA of sm_90 can have
constexpr int kMargin = 1024;        // behind them, which nobody may write to
constexpr int kStackBytes = 256 << 10;
constexpr int kMostThreads = 1024, kMostNamed = 16;

alignas(1024) uint8_t memory[kMostShared + kMargin];

struct Named {
  int threads = 0, arrived = 0;
  uint64_t turn = 0;
};

std::vector<int> order;  // of the warps
std::map<uint32_t, Mbarrier> mbarriers;
Named named[kMostNamed];
const std::function<void()>* body;
int shared_size;
jmp_buf scheduler;
std::string failure;
uint64_t schedule = 0;
std::mt19937 random_bits;

bool at_random() { return schedule % 2 != 0; }

// ---- fibers ------------------------------------------------------------------------------------------------------

void leave() {
  if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
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

bool chance(int of) { return at_random() && random_bits() % of == 0; }

void fail(const std::string& text) {
  if (failure.empty()) failure = text;
  if (current >= 0) _longjmp(scheduler, 1);
}

std::string place(uint32_t address) { return "byte " + std::to_string(address) + " of shared memory"; }

void wait_for(Wait::Kind kind, uint32_t which, const uint64_t& counter) {
  fibers[current].wait = {kind, which, &counter, counter};
  leave();
  fibers[current].wait = {};
}

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

}  // namespace cake::emulator

// How the launches to come are scheduled, and how many multiprocessors there are for them.
extern "C" __attribute__((visibility("default"))) void cake_emulator_set(uint64_t schedule, int multiprocessors) {
  cake::emulator::schedule = schedule;
  cake::emulator::multiprocessors = multiprocessors;
}
