//! What the kernel tells of the machine it runs on: its memory, its name, its random numbers.

use std::fs;
use std::io::{self, Read as _};

use super::control_group;

/// Bytes of memory that may be taken without swapping, and without going beyond a limit of this process's control groups; `None` where the kernel does not say.
pub fn available_memory() -> Option<u64> {
    let bytes = bytes_in(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(control_group::memory().map_or(bytes, |group| bytes.min(group.left)))
}

/// Bytes of memory that there are for this process: those of the machine, or of its control groups; `None` where the kernel does not say.
pub fn total_memory() -> Option<u64> {
    let bytes = bytes_in(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    Some(control_group::memory().map_or(bytes, |group| bytes.min(group.limit)))
}

fn bytes_in(meminfo: &str, name: &str) -> Option<u64> {
    let kilobytes = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    kilobytes.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The machine's name, for people; empty where the kernel does not say.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// A number from the kernel's random source.
pub fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes_and_nothing_is_made_of_what_is_not_understood() {
        let meminfo = "MemTotal:       32614744 kB\nMemAvailable:   24601232 kB\nBuffers:  12 kB\n";
        let available_in = |meminfo| bytes_in(meminfo, "MemAvailable:");
        assert_eq!(available_in(meminfo), Some(24_601_232 * 1024));
        assert_eq!(bytes_in(meminfo, "MemTotal:"), Some(32_614_744 * 1024));
        for odd in [
            "",
            "MemTotal: 5 kB",
            "MemAvailable: five kB",
            "MemAvailable: 5 MB",
            "MemAvailable: 18446744073709551615 kB",
        ] {
            assert_eq!(available_in(odd), None, "{odd}");
        }
        assert!(available_memory().is_some_and(|bytes| bytes > 0));
        assert!(total_memory() >= available_memory());
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
