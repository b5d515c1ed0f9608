//! How much memory this machine has to give, and what a served model gets of it.

use std::fs;
use std::path::Path;

use engine::EngineOptions;
use engine::plan::{Footprint, Plan, Room, TooLarge, Wishes, plan};
use ops::DryRun;

use crate::generate::{LoadRequest, Section};
use crate::local::{Sources, build_with};

/// Tokens of context of a served lane unless asked for otherwise, or the model can do less.
const CONTEXT: usize = 32_768;
/// Tokens of context of a single conversation, likewise.
const CONVERSATION: usize = 8192;
/// Lanes unless asked for otherwise.
const LANES: usize = 4;
/// What to plan with where the system doesn't say what is free and nobody did.
const UNKNOWN: u64 = 16 << 30;

/// Plans a served model. `free`: bytes that are free where it is to lie, if that is known; `fresh`
/// makes a device that only counts.
///
/// # Errors
/// It does not fit, or its files are not what they should be.
pub fn planned(
    request: &LoadRequest,
    sources: &Sources,
    base: EngineOptions,
    wishes: &Wishes,
    free: Option<u64>,
    fresh: &dyn Fn() -> DryRun,
) -> anyhow::Result<Plan> {
    let wishes = Wishes { context: wishes.context.or(request.context), ..*wishes };
    let room = Room {
        free: free.unwrap_or(wishes.max_memory.unwrap_or(UNKNOWN)),
        longest_context: sources.longest_context(),
        default_context: CONTEXT,
        default_lanes: LANES,
    };
    let advice = "free memory, raise --max-memory, or lower --context, --lanes or --cache-memory";
    fitted(request, sources, base, &wishes, &room, fresh, advice)
}

/// Plans a conversation of its own: one lane, and nothing kept beside it. As [`planned`] otherwise; where nobody
/// says what is free, it is tried.
///
/// # Errors
/// It does not fit, or its files are not what they should be.
pub fn conversation(
    request: &LoadRequest,
    sources: &Sources,
    base: EngineOptions,
    free: Option<u64>,
    fresh: &dyn Fn() -> DryRun,
) -> anyhow::Result<Plan> {
    let wishes =
        Wishes { context: request.context, lanes: Some(1), cache: Some(0), max_memory: None };
    let room = Room {
        free: free.unwrap_or(u64::MAX / 2),
        longest_context: sources.longest_context(),
        default_context: CONVERSATION,
        default_lanes: 1,
    };
    fitted(request, sources, base, &wishes, &room, fresh, "free memory, or lower --context")
}

fn fitted(
    request: &LoadRequest,
    sources: &Sources,
    base: EngineOptions,
    wishes: &Wishes,
    room: &Room,
    fresh: &dyn Fn() -> DryRun,
    advice: &str,
) -> anyhow::Result<Plan> {
    let mut measure = |options: &EngineOptions| -> Result<Footprint, anyhow::Error> {
        let engine = build_with(fresh(), *options, sources, request, &mut |_| ())?;
        Ok(Footprint::of(&engine))
    };
    plan::<anyhow::Error>(base, wishes, room, &mut measure).map_err(|error| {
        let too_large = error.is::<TooLarge>();
        if too_large { error.context(format!("the model does not fit: {advice}")) } else { error }
    })
}

/// A plan for people.
pub fn section(plan: &Plan) -> Section {
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let (options, footprint) = (&plan.options, &plan.footprint);
    let pages = options.pages.unwrap_or(0);
    let facts = [
        ("lanes", format!("{} of {} tokens", options.slots, options.context)),
        ("weights", mb(footprint.memory.weights + footprint.memory.draft)),
        (
            "keys and values",
            format!(
                "{} in {pages} pages of {}, {}",
                mb(footprint.memory.kv),
                mb(footprint.page),
                options.kv.name()
            ),
        ),
        ("recurrent state", mb(footprint.memory.state)),
        ("working buffers", mb(footprint.working)),
        (
            "of these, the prefix cache",
            format!(
                "{} for {} checkpoints of {}",
                mb(plan.cache),
                options.snapshots,
                mb(footprint.snapshot)
            ),
        ),
        ("in all", format!("{} of {} that may be used", mb(footprint.total()), mb(plan.budget))),
    ];
    let facts = facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Section { title: "Memory plan".to_owned(), facts }
}

/// Bytes of memory that this process may still take: what the system has available, or what its
/// control groups leave it, whichever is less. `None` where the system doesn't say.
pub fn host_free() -> Option<u64> {
    free_in(Path::new("/"))
}

/// [`host_free`] of a system whose files lie under `root`.
fn free_in(root: &Path) -> Option<u64> {
    let available = field(&read(&root.join("proc/meminfo"))?, "MemAvailable:")? * 1024;
    Some(group_free(root).map_or(available, |free| free.min(available)))
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// The number behind a name, of lines with names and numbers.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// What the control groups of this process leave it, those above included.
fn group_free(root: &Path) -> Option<u64> {
    let groups = read(&root.join("proc/self/cgroup"))?;
    let mut least = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(kinds), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let base = root.join("sys/fs/cgroup");
        let (base, names) = match kinds {
            "" => (base, ["memory.max", "memory.current", "inactive_file"]),
            kinds if kinds.split(',').any(|kind| kind == "memory") => (
                base.join("memory"),
                ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
            ),
            _ => continue,
        };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let free = one_group_free(&base.join(group), names);
            least = [least, free].into_iter().flatten().min();
        }
    }
    least
}

/// A group's limit less what it uses. File pages that nobody has used lately don't count as used: the
/// system takes them back before it refuses anything.
fn one_group_free(group: &Path, [limit, used, inactive]: [&str; 3]) -> Option<u64> {
    let number = |name: &str| read(&group.join(name))?.trim().parse::<u64>().ok();
    let (limit, used) = (number(limit)?, number(used)?);
    let stat = read(&group.join("memory.stat")).unwrap_or_default();
    let inactive = field(&stat, &format!("{inactive} ")).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(inactive)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(name: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = std::env::temp_dir().join(format!("th-engine-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
        let free = free_in(&root);
        let _ = fs::remove_dir_all(root);
        free
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:   2000 kB\n");

    #[test]
    fn what_is_available_counts_unless_a_group_leaves_less() {
        assert_eq!(system("none", &[]), None);
        assert_eq!(system("plain", &[MEMINFO]), Some(2_048_000));
        let second = [
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "5\n"),
            ("sys/fs/cgroup/a/memory.max", "1000000\n"),
            ("sys/fs/cgroup/a/memory.current", "700000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 200000\nactive_file 7\n"),
        ];
        assert_eq!(system("second", &second), Some(500_000));
        let first = [
            MEMINFO,
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/box\n0::/\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "900000\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1000000\n"),
            (
                "sys/fs/cgroup/memory/box/memory.stat",
                "inactive_file 1\ntotal_inactive_file 300000\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n"),
        ];
        assert_eq!(system("first", &first), Some(200_000));
    }
}
