//! Mounted buckets: file systems in user space over an object store, found in the kernel's list of
//! mounts. They have no atomic rename of directories and no durable fsync, so no step can be
//! committed there. Reading is fine.

use std::path::Path;

use crate::{Error, Result};

/// The kernel's list of mounts.
const MOUNTINFO: &str = "/proc/self/mountinfo";

/// Programs that mount a bucket, as the file system type names them (`fuse.<name>`), or the source
/// of a mount of type `fuse`.
const PROGRAMS: [&str; 9] =
    ["gcsfuse", "mountpoint-s3", "s3fs", "rclone", "goofys", "geesefs", "blobfuse", "blobfuse2", "aws-s3"];

/// Refuses to write to a mounted bucket. `device` is the device number of the directory `there`.
/// Without a readable list of mounts it accepts every directory.
pub(super) fn refuse_bucket(there: &Path, device: u64) -> Result<()> {
    let Ok(list) = std::fs::read(MOUNTINFO) else { return Ok(()) };
    match bucket_program(&String::from_utf8_lossy(&list), device) {
        Some(program) => Err(Error::Misuse(format!(
            "{} is a bucket mounted by {program}, which cannot rename a directory atomically or make it \
             durable: no step can be committed there. Save to a disk or a shared file system, and copy \
             committed steps to the bucket",
            there.display()
        ))),
        None => Ok(()),
    }
}

/// Returns the type of the file system that is mounted as that device.
pub(super) fn file_system(device: u64) -> Option<String> {
    let list = std::fs::read(MOUNTINFO).ok()?;
    mounted(&String::from_utf8_lossy(&list), device).next().map(|(file_system, _)| file_system.to_owned())
}

/// Returns the program that mounts a bucket as that device.
fn bucket_program(list: &str, device: u64) -> Option<&'static str> {
    mounted(list, device).find_map(|(file_system, source)| {
        let named = match file_system.strip_prefix("fuse.") {
            Some(program) => program,
            None if file_system == "fuse" => source,
            None => return None,
        };
        PROGRAMS.into_iter().find(|program| *program == named)
    })
}

/// Returns the types and sources of the mounts of that device.
///
/// A line of the list is `id parent major:minor root mount-point options [fields] - type source …`.
/// Lines of another form are skipped.
fn mounted(list: &str, device: u64) -> impl Iterator<Item = (&str, &str)> {
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    list.lines().filter_map(move |line| {
        let (place, kind) = line.split_once(" - ")?;
        if place.split(' ').nth(2)? != numbers {
            return None;
        }
        let mut kind = kind.split(' ');
        Some((kind.next()?, kind.next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
35 22 0:31 / /mnt/gcs rw,nosuid,nodev,relatime - fuse.gcsfuse my-bucket rw,user_id=0,group_id=0
36 22 0:32 / /mnt/s3 rw,nosuid,nodev,noatime - fuse mountpoint-s3 rw,user_id=0,group_id=0
37 22 0:33 / /mnt/a\\040b rw - fuse.s3fs s3fs rw,user_id=0,group_id=0,allow_other
38 22 0:34 / /mnt/r rw - fuse.rclone remote:bucket rw,user_id=0,group_id=0
39 22 0:35 / /mnt/g rw - fuse.goofys bucket rw
40 22 0:36 / /mnt/ssh rw - fuse.sshfs host:/ rw
41 22 0:37 / /mnt/x rw - fuse /dev/fuse rw
42 22 0:38 / /mnt/lustre rw shared:5 master:2 - lustre 10.0.0.1@tcp:/fs rw
";

    fn program(list: &str, minor: u32) -> Option<&'static str> {
        bucket_program(list, rustix::fs::makedev(0, minor))
    }

    #[test]
    fn buckets_are_found_by_their_mount() {
        let found: Vec<_> = (31..=35).map(|minor| program(LIST, minor)).collect();
        let expected = ["gcsfuse", "mountpoint-s3", "s3fs", "rclone", "goofys"].map(Some);
        assert_eq!(found, expected);
    }

    #[test]
    fn other_file_systems_are_not_buckets() {
        assert_eq!((36..=39).find_map(|minor| program(LIST, minor)), None);
        assert_eq!(bucket_program(LIST, rustix::fs::makedev(254, 0)), None);
    }

    #[test]
    fn lines_of_another_form_are_skipped() {
        for line in ["", " - ", "a b 0:31", "1 2 0:31 - fuse.gcsfuse", "x 0:31 / - fuse.gcsfuse b"] {
            assert_eq!(program(line, 31), None, "{line}");
        }
    }

    #[test]
    fn an_ordinary_directory_is_accepted() {
        refuse_bucket(Path::new("/"), 1).unwrap();
    }
}
