/* Stand between a node and the bridge, and hold every frame for a time.

       delay TAP VETH OUT_NS IN_NS

   What comes from the node by VETH, the bridge's end of its veth pair, leaves by the new device TAP after OUT_NS
   nanoseconds; what the bridge sends to TAP goes to the node after IN_NS. Frames keep their order. A header of virtio's
   kind goes with each, so that those of up to 64 KiB, which the kernel has not yet cut, pass as they are. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/if_tun.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FRAME = 65536 + 256, SLOTS = 1 << 15, BATCH = 64, BUFFER = 64 << 20 };

struct way { int from, to; int64_t hold_ns; };
struct held { int64_t due_ns; ssize_t size; char *frame; };

static void need(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *forward(void *argument) {
    const struct way *way = argument;
    struct held *ring = calloc(SLOTS, sizeof *ring);
    char *buffer = malloc(FRAME);
    uint32_t first = 0, next = 0;
    need(ring && buffer, "memory");
    prctl(PR_SET_TIMERSLACK, 1);
    for (;;) {
        int64_t wait_ns = first == next ? 1000000000LL : ring[first % SLOTS].due_ns - now_ns();
        struct timespec wait = {0, wait_ns < 0 ? 0 : wait_ns > 999999999 ? 999999999 : wait_ns};
        struct pollfd poll_from = {way->from, next - first < SLOTS ? POLLIN : 0, 0};
        ppoll(&poll_from, 1, &wait, NULL);
        for (int i = 0; i < BATCH && next - first < SLOTS; i++) {
            ssize_t size = read(way->from, buffer, FRAME);
            if (size <= 0)
                break;
            struct held *held = &ring[next++ % SLOTS];
            *held = (struct held){now_ns() + way->hold_ns, size, malloc(size)};
            need(held->frame != NULL, "memory");
            memcpy(held->frame, buffer, size);
        }
        while (first != next && ring[first % SLOTS].due_ns <= now_ns()) {
            struct held *held = &ring[first++ % SLOTS];
            struct pollfd poll_to = {way->to, POLLOUT, 0};
            while (write(way->to, held->frame, held->size) < 0 && (errno == EAGAIN || errno == ENOBUFS))
                poll(&poll_to, 1, 1);
            free(held->frame);
        }
    }
    return NULL;
}

static int open_tap(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    need(tap >= 0 && ioctl(tap, TUNSETIFF, &request) == 0, "TAP");
    need(ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN) == 0, "TUNSETOFFLOAD");
    return tap;
}

static int open_veth(const char *name) {
    int veth = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0), on = 1, size = BUFFER;
    struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL),
                             .sll_ifindex = if_nametoindex(name)};
    need(veth >= 0 && at.sll_ifindex, name);
    need(setsockopt(veth, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) == 0, "PACKET_VNET_HDR");
    need(setsockopt(veth, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) == 0, "PACKET_IGNORE_OUTGOING");
    need(setsockopt(veth, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) == 0, "SO_RCVBUFFORCE");
    need(bind(veth, (struct sockaddr *)&at, sizeof at) == 0, "bind");
    return veth;
}

int main(int argc, char **argv) {
    need(argc == 5, "arguments");
    int veth = open_veth(argv[2]), tap = open_tap(argv[1]);
    struct way out = {veth, tap, atoll(argv[3])}, in = {tap, veth, atoll(argv[4])};
    pthread_t thread;
    need(pthread_create(&thread, NULL, forward, &out) == 0, "thread");
    forward(&in);
    return 1;
}
