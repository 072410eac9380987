use std::io::Write as _;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Connections, ServedDir, ServedDisk, Server, lengths_below};
use crate::io::{Dir, Disk, Engine, EntryKind, LockKind, Rename, Transfer, open_disk};
use crate::sys::Buffer;

/// The bytes of a read of the queue.
const PIECE: usize = 1 << 20;

/// A served directory with some files, and its reader.
struct Scene {
    _home: tempfile::TempDir,
    disk: Arc<dyn Disk>,
    local: Arc<dyn Dir>,
    server: Server,
    there: ServedDir,
}

fn client(server: &Server, token: &str) -> Arc<Connections> {
    Arc::new(Connections::new(PathBuf::from("machine:/run"), server.addresses().to_vec(), token.to_owned()))
}

fn scene() -> Scene {
    let home = tempfile::tempdir().unwrap();
    let disk = open_disk(home.path(), Engine::Auto).unwrap();
    let local = disk.open_dir(home.path()).unwrap();
    let step = local.create_dir("step").unwrap();
    step.create_dir("params").unwrap();
    step.write_file("manifest.json", b"{}").unwrap();
    step.write_file("params/0.data", &pattern()).unwrap();
    step.write_file(".lease", b"").unwrap();
    let server = Server::start(Arc::clone(&local), "secret".to_owned()).unwrap();
    let there = ServedDir::new(client(&server, "secret"));
    Scene { _home: home, disk, local, server, there }
}

/// More than one request reads at once.
fn pattern() -> Vec<u8> {
    (0..9_000_000_u32).map(|at| (at / 7) as u8).collect()
}

#[test]
fn a_reader_sees_what_is_served() {
    let Scene { local, there, server, _home, .. } = &scene();
    assert_eq!(there.read_file("step/manifest.json", 10).unwrap(), b"{}");
    assert_eq!(there.entries().unwrap(), local.entries().unwrap());
    assert_eq!(there.id().unwrap(), local.id().unwrap());
    assert_eq!(there.changed().unwrap(), local.changed().unwrap());
    let step = there.open_dir("step").unwrap();
    assert_eq!(step.stat("params/0.data").unwrap(), local.stat("step/params/0.data").unwrap());
    assert_eq!(step.stat("params").unwrap().unwrap().kind, EntryKind::Dir);
    assert_eq!(step.stat("other").unwrap(), None);
    let lengths = there.lengths("step").unwrap().unwrap();
    assert_eq!(lengths, lengths_below(&local.open_dir("step").unwrap()).unwrap());
    assert_eq!(lengths.get("params/0.data"), Some(&9_000_000));
    assert_eq!(server.reads(), 0, "of data");
    let file = step.open_file("params/0.data").unwrap();
    assert_eq!(file.len().unwrap(), 9_000_000);
    assert_eq!(file.read_at(0, 10_000_000).unwrap(), pattern());
    assert_eq!(file.read_at(8_999_999, 10).unwrap().len(), 1);
    assert_eq!(file.read_at(9_000_000, 10).unwrap(), b"");
    assert!(server.reads() > 0);
}

#[test]
fn errors_keep_their_meaning() {
    let Scene { there, .. } = &scene();
    assert!(there.open_dir("none").is_err_and(|error| error.is_not_found()));
    let error = there.open_file("step/none").map(drop).unwrap_err();
    assert!(error.is_not_found(), "{error}");
    assert!(error.to_string().contains("machine:/run/step/none"), "{error}");
    let error = there.read_file("step/params/0.data", 5).unwrap_err();
    assert!(matches!(error, crate::Error::Limit { found: 9_000_000, limit: 5, .. }), "{error}");
    for outside in ["../x", "/etc/passwd", "step/../../x", "."] {
        assert!(there.read_file(outside, 100).is_err(), "{outside}");
        assert!(there.open_dir(outside).is_err(), "{outside}");
    }
}

#[test]
fn nothing_is_changed_from_elsewhere() {
    let Scene { there, local, .. } = &scene();
    let before = local.entries().unwrap();
    assert!(there.write_file("x", b"").is_err());
    assert!(there.create_dir("x").is_err());
    assert!(there.rename("step", "x", Rename::NoReplace).is_err());
    assert!(there.remove_file("step/manifest.json").is_err());
    assert!(there.try_lock("step/.lease", LockKind::Exclusive, false).is_err());
    assert!(there.try_lock("lock", LockKind::Shared, true).is_err());
    assert_eq!(local.entries().unwrap(), before);
}

#[test]
fn a_lock_is_held_until_its_reader_drops_it() {
    let Scene { there, local, .. } = &scene();
    let lock = there.try_lock("step/.lease", LockKind::Shared, false).unwrap().unwrap();
    assert_eq!(lock.id().unwrap(), local.stat("step/.lease").unwrap().unwrap().id);
    let exclusive = || local.try_lock("step/.lease", LockKind::Exclusive, false).unwrap();
    assert!(exclusive().is_none());
    drop(lock);
    let begun = Instant::now();
    while exclusive().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(10));
    }
    let held = exclusive();
    assert!(there.try_lock("step/.lease", LockKind::Shared, false).unwrap().is_none());
    drop(held);
}

#[test]
fn a_held_directory_is_read_after_it_has_lost_its_name() {
    let Scene { there, local, .. } = &scene();
    let step = there.open_dir("step").unwrap();
    let lock = step.try_lock(".lease", LockKind::Shared, false).unwrap().unwrap();
    let file = step.open_file("params/0.data").unwrap();
    local.rename("step", "trash", Rename::NoReplace).unwrap();
    local.create_dir("step").unwrap().write_file("manifest.json", b"[]").unwrap();
    assert_eq!(step.read_file("manifest.json", 10).unwrap(), b"{}");
    assert_eq!(file.read_at(7_000_000, 10).unwrap(), pattern()[7_000_000..7_000_010]);
    assert_ne!(there.stat("step").unwrap().unwrap().id, step.id().unwrap());
    drop(lock);
    let begun = Instant::now();
    while step.read_file("manifest.json", 10).is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(step.read_file("manifest.json", 10).unwrap_err().is_not_found());
}

#[test]
fn a_client_needs_the_token() {
    let Scene { server, .. } = &scene();
    let other = ServedDir::new(client(server, "guess!"));
    assert!(other.read_file("step/manifest.json", 10).is_err());
}

#[test]
fn a_reader_survives_a_lost_connection_and_ends_with_the_server() {
    let Scene { there, server, .. } = &scene();
    let read = || there.read_file("step/manifest.json", 10);
    read().unwrap();
    // The connection that is kept ends, as behind a firewall.
    there.client().end_idle_connections();
    read().unwrap();
    server.stop();
    there.client().end_idle_connections();
    let begun = Instant::now();
    assert!(read().is_err());
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_server_survives_nonsense() {
    let Scene { there, server, .. } = &scene();
    let address = server.addresses().last().unwrap();
    for nonsense in [&[0xff; 64][..], b"GET / HTTP/1.1\r\n\r\n", &[2, 0, 0, 0, b'{', b'}'], &[]] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(nonsense).unwrap();
    }
    assert!(there.read_file("step/manifest.json", 10).is_ok());
}

#[test]
fn one_queue_reads_files_of_both_machines() {
    let Scene { disk, local, there, .. } = &scene();
    let both = ServedDisk::new(Arc::clone(disk));
    let mut queue = both.queue_for_reads(4).unwrap();
    let files =
        [local.open_file("step/params/0.data").unwrap(), there.open_file("step/params/0.data").unwrap()];
    let expected = pattern();
    let (mut submitted, mut ended) = (0, 0);
    while ended < 16 {
        if submitted < 16 && queue.in_flight() < 4 {
            let buffer = Buffer::alone(PIECE).unwrap();
            let offset = (submitted / 2) as u64 * PIECE as u64;
            queue.submit(Transfer::Read, &files[submitted % 2], offset, PIECE, buffer, submitted as u64);
            submitted += 1;
            continue;
        }
        let completion = queue.complete(Duration::from_secs(20)).unwrap();
        let offset = completion.token as usize / 2 * PIECE;
        let read = completion.result.unwrap();
        assert_eq!(read, PIECE.min(expected.len() - offset));
        assert_eq!(completion.buffer.get(..read), expected.get(offset..offset + read));
        ended += 1;
    }
    assert_eq!(queue.in_flight(), 0);
    assert!(queue.complete(Duration::from_millis(1)).is_none());
}
