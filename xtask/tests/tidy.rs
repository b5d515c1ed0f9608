//! The repository keeps its promises, and the checks can fail.

use xtask::{root, tidy};

#[test]
fn the_repository_is_tidy() {
    let faults = tidy::check(&root()).expect("the checks run");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn faults_are_found() {
    let faults_of = |shown: &str, text: &str| {
        let mut faults = Vec::new();
        tidy::source(shown, text, &mut faults);
        faults.len()
    };
    let unlisted = |text: &str| {
        let mut faults = Vec::new();
        tidy::unlisted_cases("cases.rs", text, &mut faults);
        faults.len()
    };
    let case = "#[cfg_attr(test, test)]\nfn one() {}\n";
    assert_eq!(unlisted(&format!("crate::testing::cases!(\n    one,\n);\n{case}")), 0);
    assert_eq!(unlisted(&format!("crate::testing::cases!(\n    two,\n);\n{case}")), 1);
    assert_eq!(unlisted(case), 1);
    assert_eq!(faults_of("crates/ops/src/a.rs", "fn f() {}\n"), 0);
    assert_eq!(faults_of("crates/ops/src/a.rs", "let x = std::env::var(\"X\");\n"), 1);
    assert_eq!(faults_of("crates/app/src/config.rs", "let x = std::env::var(\"X\");\n"), 0);
    assert_eq!(faults_of("crates/ops/src/a.rs", "// TODO later\n"), 1);
    assert_eq!(faults_of("crates/ops/src/a.rs", &"\n".repeat(701)), 1);
    assert_eq!(faults_of("crates/ops/tests/a.rs", "#[ignore]\n"), 1);
}
