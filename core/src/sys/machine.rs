//! Facts from the kernel about the machine: its memory, its name, random numbers.

use std::fs;
use std::io::{self, Read as _};

use super::control_group;

/// Returns the bytes of memory available without swapping and within this process's control groups.
/// `None` if the kernel does not say.
pub fn available_memory() -> Option<u64> {
    let bytes = bytes_in(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(control_group::memory().map_or(bytes, |group| bytes.min(group.left)))
}

/// Returns the total memory of the machine or of this process's control groups, in bytes. `None` if
/// the kernel does not say.
pub fn total_memory() -> Option<u64> {
    let bytes = bytes_in(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    Some(control_group::memory().map_or(bytes, |group| bytes.min(group.limit)))
}

fn bytes_in(meminfo: &str, name: &str) -> Option<u64> {
    let kilobytes = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    kilobytes.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the host name, for messages. Empty if the kernel does not say.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Returns the CPU socket that this process is bound to. `None` if it may run on several, or the
/// kernel does not say.
pub fn socket() -> Option<u32> {
    let of_processor = |number: u32| {
        fs::read_to_string(format!("/sys/devices/system/cpu/cpu{number}/topology/physical_package_id")).ok()
    };
    socket_of(&fs::read_to_string("/proc/self/status").ok()?, of_processor)
}

fn socket_of(status: &str, of_processor: impl Fn(u32) -> Option<String>) -> Option<u32> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim();
    let mut found = None;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for processor in first.parse::<u32>().ok()?..=last.parse::<u32>().ok()? {
            let socket = of_processor(processor)?.trim().parse().ok()?;
            if *found.get_or_insert(socket) != socket {
                return None;
            }
        }
    }
    found
}

/// Returns a number from the kernel's random source.
pub fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_sizes_are_read_in_bytes_or_not_at_all() {
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
    fn a_process_is_on_a_socket_with_all_its_processors() {
        let sockets = ["0\n", "0\n", "1\n", "1\n", "-1\n"];
        let of_processor = |number: u32| sockets.get(number as usize).map(ToString::to_string);
        for (list, socket) in [
            ("0-1", Some(0)),
            ("2,3", Some(1)),
            ("3", Some(1)),
            ("0-3", None),
            ("1,3", None),
            ("4", None),
            ("5", None),
            ("", None),
            ("x-y", None),
        ] {
            let status = format!("Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t{list}\n");
            assert_eq!(socket_of(&status, of_processor), socket, "{list}");
        }
        assert_eq!(socket_of("", of_processor), None);
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
