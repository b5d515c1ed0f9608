// The one argument of a chain: `Program` in kernel.rs.
#define MOST_STAGES 56
#define WORDS 19

struct Program {
    u64* meetings;  // counts arrivals, for ever
    u64 count;
    u64 kind[MOST_STAGES];
    u64 word[MOST_STAGES][WORDS];
};
