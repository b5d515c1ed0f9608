//! Peak resident memory of the real program: weights, draft, keys and values, and little more.

#[cfg(not(target_os = "linux"))]
#[test]
fn peak_memory_is_bounded() {
    println!("skipped: peak memory is only measured on Linux");
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use serde_json::Value;

    /// What the program may take beside weights, draft, and keys and values.
    const REST: u64 = 150_000_000;
    const TOKENS: u64 = 200;

    /// Runs the program; returns its report and its peak resident bytes.
    fn run(context: &str) -> (Value, u64) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_th-engine"));
        command.args(["run", "--json", "--draft", "auto", "--temperature", "0"]);
        command.args(["--device", "cpu", "--threads", "2"]);
        command.args(["--context", context, "--max-tokens", &TOKENS.to_string()]);
        command.args(["--prompt", "Write a long story about a lighthouse and its keeper."]);
        command.env_remove("TH_ENGINE_MODELS").env_remove("TH_ISA");
        #[expect(clippy::zombie_processes, reason = "waited for below, with its usage")]
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("spawn");
        let mut out = String::new();
        child.stdout.take().expect("a pipe").read_to_string(&mut out).expect("UTF-8");
        let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
        let pid = libc::pid_t::try_from(child.id()).expect("a process id");
        // SAFETY: both pointers are valid for the call. The child is ours and not waited for yet;
        // `child` is not used again.
        let waited = unsafe { libc::wait4(pid, &mut status, 0, usage.as_mut_ptr()) };
        assert_eq!((waited, status), (pid, 0), "the program failed");
        // SAFETY: zero bytes are a valid `rusage`, and `wait4` has filled it.
        let peak_kib = unsafe { usage.assume_init() }.ru_maxrss;
        let report = serde_json::from_str(&out).expect("one JSON object");
        (report, 1024 * u64::try_from(peak_kib).expect("a size"))
    }

    #[test]
    fn peak_memory_is_bounded() {
        // A short context leaves few untouched pages for anything else to hide behind.
        for context in ["8192", "512"] {
            let (report, peak) = run(context);
            assert_eq!(report["usage"]["completion_tokens"], TOKENS);
            assert!(report["draft"].is_string(), "{report}");
            let bytes = |name: &str| report["memory"][name].as_u64().expect("bytes");
            let (weights, kv) = (bytes("weights_bytes") + bytes("draft_bytes"), bytes("kv_bytes"));
            let mb = |bytes: u64| bytes as f64 / 1e6;
            println!(
                "context {context}: peak {:.1} MB = weights and draft {:.1} + keys and values \
                 {:.1} + {:.1}",
                mb(peak),
                mb(weights),
                mb(kv),
                mb(peak) - mb(weights + kv)
            );
            assert!(peak <= weights + kv + REST, "context {context}: {peak} bytes");
            assert!(peak > weights, "less than the weights can't be all of it");
        }
    }
}
