// Whole tiles between global and shared memory by one thread: the tensor maps of TMA. host.cuh makes them.
#pragma once

#include <cuda.h>

#include "tile.cuh"

namespace cake {

// A tensor [batch, token, head, channel] as boxes of 64 tokens and 64 channels of a head, each a panel of a tile. An argument
// of a kernel (`__grid_constant__`), since a map must not lie on a stack.
struct TileMap {
  CUtensorMap map;
  const void* data;  // the address that is in it

  // On the host: lets the map follow `data`.
  void readdress();
};

// A tile of kPanels panels; completes its bytes on `bar`. `token`: within its row of the batch.
template <int kPanels>
__device__ __forceinline__ void load_tile(uint32_t tile, const TileMap& from, int head, int token, int batch,
                                          uint32_t bar) {
#pragma unroll
  for (int i = 0; i < kPanels; ++i)
    tensor_load(tile + i * kSquareTileBytes, &from.map, 64 * i, head, token, batch, bar);
}

// And back, as a part of a bulk group.
template <int kPanels>
__device__ __forceinline__ void store_tile(const TileMap& to, int head, int token, int batch, uint32_t tile) {
#pragma unroll
  for (int i = 0; i < kPanels; ++i) tensor_store(&to.map, 64 * i, head, token, batch, tile + i * kSquareTileBytes);
}

}  // namespace cake
