// gdn_mix as a launch of its own, for lanes that are no stage of a chain (after stage.cuh)
// launch   grid (2, VALUE_HEADS, lanes) in clusters of 2, block THREADS
// source   stage.cuh, whose bits it has

// So many registers that several blocks share a multiprocessor.
#define SHARING (65536 / (gdn::THREADS * (gdn::OWN <= 8 ? 64 : 128)))
#define RESIDENT (SHARING < 16 ? SHARING : 16)

extern "C" __global__ void __launch_bounds__(gdn::THREADS, RESIDENT) gdn_mix(
    u64 qkv, u64 a, u64 b, u64 gate, u64 conv, u64 decay, u64 dt_bias, u64 weight, u64 history, u64 state, u64 pending, u64 out,
    u64 steps, u32 eps, u32 lanes) {
    __shared__ gdn::Shared shared;
    __shared__ gdn::Mailbox mailbox;
    const u64 word[15] = {qkv, a, b, gate, conv, decay, dt_bias, weight, history, state, pending, out, steps, eps, lanes};
    if (threadIdx.x == 0) {
        gdn::init(mailbox);
        phase_init_fence();
    }
    __syncthreads();
    cluster_arrive();
    launch_next();
    gdn::Item item;
    gdn::Peer peer = {mailbox, 0};
    gdn::begin(shared, item, word, blockIdx.z * gdn::VALUE_HEADS + blockIdx.y, false);
    wait();
    cluster_wait();
    gdn::finish(shared, item, word, peer);
    // What a block sends has to find the other's memory.
    cluster_arrive();
    cluster_wait();
}
