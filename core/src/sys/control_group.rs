//! The memory limits of this process's control groups. Containers and batch systems set such
//! limits, and the kernel kills a process that exceeds them. `/proc/meminfo` does not report them.
//!
//! Files of version 2: `memory.max`, `memory.current` and `memory.stat`. Files of version 1:
//! `memory.limit_in_bytes`, `memory.usage_in_bytes` and `memory.stat`. See
//! Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.

use std::fs;
use std::path::{Path, PathBuf};

/// The mount point of the hierarchies.
const MOUNTED: &str = "/sys/fs/cgroup";

/// Memory of a group, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupMemory {
    /// Bytes that the group may use.
    pub(super) limit: u64,
    /// Available bytes: free, or cached file pages that can be dropped.
    pub(super) left: u64,
}

/// Returns the smallest limit and the smallest available memory among the groups of this process.
/// `None` if no group has a limit.
pub(super) fn memory() -> Option<GroupMemory> {
    narrowest(Path::new(MOUNTED), &fs::read_to_string("/proc/self/cgroup").ok()?)
}

/// Like [`memory`]. `groups` is the text of `/proc/self/cgroup`: a line `number:controllers:path`
/// for each hierarchy. The controllers are empty for version 2.
fn narrowest(mounted: &Path, groups: &str) -> Option<GroupMemory> {
    let mut found: Option<GroupMemory> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (tops, files): (Vec<PathBuf>, _) = if controllers.is_empty() {
            (vec![mounted.to_owned(), mounted.join("unified")], &V2)
        } else if controllers.split(',').any(|name| name == "memory") {
            (vec![mounted.join("memory")], &V1)
        } else {
            continue;
        };
        for top in tops {
            // Parent groups' limits count as well. In a container, the path may be the host's and
            // be missing: the mounted top is then the container's own group.
            let group = top.join(path.trim_start_matches('/'));
            for group in group.ancestors().take_while(|group| group.starts_with(&top)) {
                let Some(memory) = files.read(group) else { continue };
                found = Some(found.map_or(memory, |least| GroupMemory {
                    limit: least.limit.min(memory.limit),
                    left: least.left.min(memory.left),
                }));
            }
        }
    }
    found
}

/// The file names of one version.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Key in `memory.stat`: bytes of file pages that have been idle for long.
    idle: &'static str,
}

const V1: Files =
    Files { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", idle: "total_inactive_file" };
const V2: Files = Files { limit: "memory.max", usage: "memory.current", idle: "inactive_file" };

impl Files {
    /// Returns the group's memory, `None` without a limit or without the group.
    fn read(&self, group: &Path) -> Option<GroupMemory> {
        let text = |name| fs::read_to_string(group.join(name)).ok();
        let number = |name| text(name)?.trim().parse::<u64>().ok(); // not of `max`, version 2's word for no limit
        let limit = number(self.limit)?;
        let usage = number(self.usage)?;
        let idle = text("memory.stat").and_then(|stat| {
            let value = stat.lines().find_map(|line| line.strip_prefix(self.idle)?.strip_prefix(' '))?;
            value.trim().parse::<u64>().ok()
        });
        let used = usage.saturating_sub(idle.unwrap_or(0));
        Some(GroupMemory { limit, left: limit.saturating_sub(used) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(path: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(path).unwrap();
        for (name, text) in files {
            fs::write(path.join(name), text).unwrap();
        }
    }

    #[test]
    fn the_narrowest_of_a_group_and_those_above_it_counts() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        group(&top.join("job"), &[("memory.max", "1000\n"), ("memory.current", "900\n")]);
        let stat = "anon 500\ninactive_file 250\nactive_file 7\n";
        group(
            &top.join("job/step"),
            &[("memory.max", "4000\n"), ("memory.current", "600\n"), ("memory.stat", stat)],
        );
        assert_eq!(narrowest(top, "0::/job/step\n"), Some(GroupMemory { limit: 1000, left: 100 }));
        fs::write(top.join("job/memory.max"), "max\n").unwrap();
        assert_eq!(narrowest(top, "0::/job/step\n"), Some(GroupMemory { limit: 4000, left: 3650 }));
        assert_eq!(narrowest(top, "0::/job\n"), None);
    }

    #[test]
    fn in_a_container_the_group_is_the_top() {
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("memory.limit_in_bytes", "2000\n"),
            ("memory.usage_in_bytes", "1500\n"),
            ("memory.stat", "inactive_file 1\ntotal_inactive_file 300\n"),
        ];
        group(&dir.path().join("memory"), &files);
        let groups = "5:cpu,cpuacct:/docker/1\n4:memory,hugetlb:/docker/1\n0::/docker/1\n";
        assert_eq!(narrowest(dir.path(), groups), Some(GroupMemory { limit: 2000, left: 800 }));
    }

    #[test]
    fn nothing_is_made_of_what_is_not_understood() {
        let dir = tempfile::tempdir().unwrap();
        group(dir.path(), &[("memory.max", "many\n"), ("memory.current", "1\n")]);
        for odd in ["", "0::/\n", "rubbish", "4:memory", "4:memory:/../..\n"] {
            assert_eq!(narrowest(dir.path(), odd), None, "{odd}");
        }
        // Only check that the process's own groups can be read.
        let _ = memory();
    }
}
