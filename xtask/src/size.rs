//! Lines of code by crate, code and tests apart.

use std::path::Path;

use crate::files;

/// Prints a table.
pub fn print(root: &Path) -> std::io::Result<()> {
    println!("{:<16} {:>7} {:>7}", "crate", "code", "tests");
    for name in ["ops", "model", "engine", "app", "cuda", "webgpu"] {
        let dir = root.join("crates").join(name);
        if !dir.exists() {
            continue;
        }
        let (mut code, mut tests) = (0, 0);
        for file in files(&dir, &[".rs", ".cu", ".wgsl"])? {
            let text = std::fs::read_to_string(&file)?;
            let split = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
            let all_tests =
                file.ends_with("cases.rs") || file.components().any(|c| c.as_os_str() == "tests");
            let (head, tail) = if all_tests { ("", &text[..]) } else { text.split_at(split) };
            code += head.lines().count();
            tests += tail.lines().count();
        }
        println!("{name:<16} {code:>7} {tests:>7}");
    }
    Ok(())
}
