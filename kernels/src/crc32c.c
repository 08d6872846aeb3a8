/* CRC-32C (Castagnoli, reflected 0x82F63B78), the checksum of model files: by the CPU's own
 * instruction where there is one, else by a table. Both give the same value. */
#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

#define POLYNOMIAL 0x82F63B78u

/* Eight tables: entry [k][b] is the CRC of byte b followed by k zero bytes. */
static uint32_t table[8][256];
static atomic_int table_ready;

/* Two threads may both fill it: they store the same values. */
static void fill_table(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++)
            table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 255];
    atomic_store_explicit(&table_ready, 1, memory_order_release);
}

uint32_t crc32c_portable(uint32_t crc, const void *bytes, size_t num_bytes)
{
    if (!atomic_load_explicit(&table_ready, memory_order_acquire))
        fill_table();
    const uint8_t *at = bytes;
    crc = ~crc;
    for (; num_bytes >= 8; num_bytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++)
            crc ^= table[7 - k][word >> 8 * k & 255];
    }
    for (; num_bytes; num_bytes--)
        crc = crc >> 8 ^ table[0][(crc ^ *at++) & 255];
    return ~crc;
}

#if defined(__x86_64__)

#include <nmmintrin.h>

#define STREAM_BYTES 2048

/* shift[k][b]: the CRC register with byte k equal to b, moved past STREAM_BYTES zero bytes. */
static uint32_t shift[4][256];
static atomic_int shift_ready;

__attribute__((target("sse4.2"))) static void fill_shift(void)
{
    for (int k = 0; k < 4; k++)
        for (uint32_t b = 0; b < 256; b++) {
            uint64_t crc = b << 8 * k;
            for (int i = 0; i < STREAM_BYTES / 8; i++)
                crc = _mm_crc32_u64(crc, 0);
            shift[k][b] = (uint32_t)crc;
        }
    atomic_store_explicit(&shift_ready, 1, memory_order_release);
}

static uint32_t shifted(uint32_t crc)
{
    return shift[0][crc & 255] ^ shift[1][crc >> 8 & 255] ^ shift[2][crc >> 16 & 255] ^
           shift[3][crc >> 24];
}

/* The instruction takes three cycles and a new one can start in each: three streams at once. */
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t start, const void *bytes,
                                                               size_t num_bytes)
{
    if (!atomic_load_explicit(&shift_ready, memory_order_acquire))
        fill_shift();
    const uint8_t *at = bytes;
    uint64_t crc = ~start;
    for (; num_bytes >= 3 * STREAM_BYTES; num_bytes -= 3 * STREAM_BYTES, at += 3 * STREAM_BYTES) {
        uint64_t second = 0, third = 0, a, b, c;
        for (size_t i = 0; i < STREAM_BYTES; i += 8) {
            memcpy(&a, at + i, 8);
            memcpy(&b, at + STREAM_BYTES + i, 8);
            memcpy(&c, at + 2 * STREAM_BYTES + i, 8);
            crc = _mm_crc32_u64(crc, a);
            second = _mm_crc32_u64(second, b);
            third = _mm_crc32_u64(third, c);
        }
        crc = shifted(shifted((uint32_t)crc) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (uint64_t word; num_bytes >= 8; num_bytes -= 8, at += 8) {
        memcpy(&word, at, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    uint32_t rest = (uint32_t)crc;
    for (; num_bytes; num_bytes--)
        rest = _mm_crc32_u8(rest, *at++);
    return ~rest;
}

uint32_t crc32c(uint32_t crc, const void *bytes, size_t num_bytes)
{
    if (__builtin_cpu_supports("sse4.2"))
        return crc32c_sse42(crc, bytes, num_bytes);
    return crc32c_portable(crc, bytes, num_bytes);
}

#elif defined(__aarch64__)

#include <sys/auxv.h>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

/* Written as instructions: arm_acle.h offers them only when the whole file is compiled for them. */
__attribute__((target("+crc"))) static uint32_t crc32c_arm(uint32_t crc, const void *bytes,
                                                           size_t num_bytes)
{
    const uint8_t *at = bytes;
    crc = ~crc;
    for (uint64_t word; num_bytes >= 8; num_bytes -= 8, at += 8) {
        memcpy(&word, at, 8);
        __asm__("crc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    }
    for (; num_bytes; num_bytes--, at++)
        __asm__("crc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)*at));
    return ~crc;
}

uint32_t crc32c(uint32_t crc, const void *bytes, size_t num_bytes)
{
    if (getauxval(AT_HWCAP) & HWCAP_CRC32)
        return crc32c_arm(crc, bytes, num_bytes);
    return crc32c_portable(crc, bytes, num_bytes);
}

#else

uint32_t crc32c(uint32_t crc, const void *bytes, size_t num_bytes)
{
    return crc32c_portable(crc, bytes, num_bytes);
}

#endif
