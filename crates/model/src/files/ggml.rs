//! The block formats of ggml: ids, names and sizes.

/// A ggml type, known by its id.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(u32);

/// (id, name, elements of a block, bytes of a block).
const TYPES: &[(u32, &str, usize, usize)] = &[
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
];

impl GgmlType {
    /// The type of this id, if there is one.
    pub fn from_id(id: u32) -> Option<GgmlType> {
        TYPES.iter().any(|t| t.0 == id).then_some(GgmlType(id))
    }

    /// The id in files.
    pub fn id(self) -> u32 {
        self.0
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// Elements and bytes of one block.
    pub fn block(self) -> (usize, usize) {
        let entry = self.entry();
        (entry.2, entry.3)
    }

    fn entry(self) -> &'static (u32, &'static str, usize, usize) {
        // Only `from_id` makes a GgmlType, so the id is in the table.
        TYPES.iter().find(|t| t.0 == self.0).unwrap_or(&TYPES[0])
    }
}

impl std::fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
