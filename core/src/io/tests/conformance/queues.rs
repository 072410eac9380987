//! Promises about data files and queues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{EBADF, EEXIST, ENOENT};

use super::{BLOCK, Check, PATIENCE, Scene, assert_bytes, assert_errno, buffers, finish, pattern};
use crate::Error;
use crate::io::{File, Queue, SECTION_ALIGNMENT, Section, Transfer};
use crate::sys::{Buffer, Mapping};

pub(super) const CHECKS: &[(&str, Check)] = &[
    ("a-data-file-is-made-once", create_file_is_exclusive),
    ("what-is-written-is-read", what_is_written_is_read),
    ("preallocated-bytes-are-zeros", preallocated_bytes_are_zeros),
    ("reads-are-short-only-at-the-end", reads_are_short_only_at_the_end),
    ("a-padded-tail-is-cut", a_padded_tail_is_cut),
    ("a-file-that-nobody-has-is-taken-over", a_file_that_nobody_has_is_taken_over),
    ("an-existing-file-is-overwritten", an_existing_file_is_opened_for_writing_over_its_content),
    ("sections-of-a-file-are-files", sections_of_a_file_are_files),
    ("read-at-takes-any-offset", read_at_takes_any_offset),
    ("cutting-and-growing-leaves-zeros", cutting_and_growing_leaves_zeros),
    ("a-transfer-touches-its-bytes-only", a_transfer_touches_its_bytes_only),
    ("many-in-flight-come-back-once", many_in_flight_come_back_once),
    ("a-full-queue-takes-more", a_full_queue_takes_more),
    ("an-idle-queue-answers-at-once", an_idle_queue_answers_at_once),
    ("errors-give-the-buffer-back", errors_give_the_buffer_back),
    ("a-dropped-queue-frees-its-memory", a_dropped_queue_frees_its_memory),
    ("queues-work-side-by-side", queues_work_side_by_side),
    ("a-queue-moves-between-threads", a_queue_moves_between_threads),
    ("an-open-file-outlives-its-name", an_open_file_outlives_its_name),
    ("registered-memory-works-like-any", registered_memory_works),
    ("any-sequence-matches-a-model", any_sequence_matches_a_model),
];

/// Writes `bytes` (whole blocks) at `offset`.
fn write(queue: &mut dyn Queue, file: &Arc<dyn File>, offset: usize, bytes: &[u8]) {
    let mut buffer = Buffer::alone(bytes.len()).unwrap();
    buffer[..bytes.len()].copy_from_slice(bytes);
    queue.submit(Transfer::Write, file, offset as u64, bytes.len(), buffer, 77);
    let done = finish(queue);
    assert_eq!((done.token, done.result.unwrap()), (77, bytes.len()));
}

/// Reads `len` bytes (whole blocks) at `offset`, less at the end of the file.
fn read(queue: &mut dyn Queue, how: Transfer, file: &Arc<dyn File>, offset: usize, len: usize) -> Vec<u8> {
    let mut buffer = Buffer::alone(len.max(1)).unwrap();
    buffer.fill(0xEE);
    queue.submit(how, file, offset as u64, len, buffer, 78);
    let done = finish(queue);
    assert_eq!(done.token, 78);
    let count = done.result.unwrap();
    done.buffer[..count].to_vec()
}

const READS: [Transfer; 2] = [Transfer::Read, Transfer::ReadCached];

fn create_file_is_exclusive(scene: &Scene<'_>) {
    scene.data_file("f", b"first");
    for hint in [0, 1 << 20] {
        assert_errno(scene.dir.create_file("f", hint), &[EEXIST], "f");
        assert_errno(scene.dir.create_file("none/f", hint), &[ENOENT], "none/f");
    }
    assert_eq!(scene.dir.open_file("f").unwrap().read_at(0, 100).unwrap(), b"first");
    assert_errno(scene.dir.open_file("none"), &[ENOENT], "none");
    scene.dir.create_dir("d").unwrap();
    assert!(scene.dir.open_file("d").is_err());
    assert_errno(scene.dir.create_file("d", 0), &[EEXIST], "d");
}

fn what_is_written_is_read(scene: &Scene<'_>) {
    let mut queue = scene.disk.queue(4).unwrap();
    for (i, len) in [BLOCK, 2 * BLOCK, 1 << 20, (5 << 20) + BLOCK].into_iter().enumerate() {
        let bytes = pattern(len, i as u64);
        for hint in [0, len] {
            let name = format!("{len}-{hint}");
            let file = scene.dir.create_file(&name, hint as u64).unwrap();
            assert!(file.path().ends_with(&name));
            write(queue.as_mut(), &file, 0, &bytes);
            file.sync().unwrap();
            assert_eq!(file.len().unwrap(), len as u64);
            let again = scene.dir.open_file(&name).unwrap();
            for file in [&file, &again] {
                for how in READS {
                    assert_bytes(&read(queue.as_mut(), how, file, 0, len), &bytes, (len, hint, how));
                    let rest = read(queue.as_mut(), how, file, BLOCK, len);
                    assert_bytes(&rest, &bytes[BLOCK..], (len, hint, how));
                }
                assert_bytes(&file.read_at(0, len).unwrap(), &bytes, (len, hint));
            }
            assert!(again.cached(0, len as u64).is_none_or(|cached| cached <= len as u64));
        }
    }
}

fn preallocated_bytes_are_zeros(scene: &Scene<'_>) {
    let mut queue = scene.disk.queue(1).unwrap();
    let file = scene.dir.create_file("f", (64 * BLOCK) as u64).unwrap();
    let bytes = pattern(BLOCK, 1);
    write(queue.as_mut(), &file, 8 * BLOCK, &bytes);
    file.set_len((16 * BLOCK) as u64).unwrap();
    file.sync().unwrap();
    assert_eq!(file.len().unwrap(), (16 * BLOCK) as u64);
    assert_eq!(scene.dir.stat("f").unwrap().unwrap().len, (16 * BLOCK) as u64);
    let mut expected = vec![0; 16 * BLOCK];
    expected[8 * BLOCK..9 * BLOCK].copy_from_slice(&bytes);
    assert_bytes(&read(queue.as_mut(), Transfer::Read, &file, 0, 64 * BLOCK), &expected, "all");
}

fn reads_are_short_only_at_the_end(scene: &Scene<'_>) {
    for len in [0, 1, 511, 512, 4095, 4096, 4097, 10_000, 12_288] {
        let name = format!("f{len}");
        let bytes = pattern(len, len as u64);
        scene.data_file(&name, &bytes);
        let file = scene.dir.open_file(&name).unwrap();
        let mut queue = scene.disk.queue(2).unwrap();
        for how in READS {
            for start in [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 100 * BLOCK] {
                for want in [BLOCK, 4 * BLOCK] {
                    let found = read(queue.as_mut(), how, &file, start, want);
                    let expected = &bytes[start.min(len)..(start + want).min(len)];
                    assert_bytes(&found, expected, (len, how, start, want));
                }
            }
        }
    }
}

fn a_padded_tail_is_cut(scene: &Scene<'_>) {
    let bytes = pattern(3 * BLOCK, 3);
    let mut queue = scene.disk.queue(1).unwrap();
    let file = scene.dir.create_file("f", (1 << 20) as u64).unwrap();
    write(queue.as_mut(), &file, 0, &bytes);
    file.set_len(10_000).unwrap();
    file.sync().unwrap();
    assert_eq!(scene.dir.stat("f").unwrap().unwrap().len, 10_000);
    assert_bytes(&scene.dir.read_file("f", 1 << 20).unwrap(), &bytes[..10_000], "small file");
    assert_bytes(&read(queue.as_mut(), Transfer::Read, &file, 0, 3 * BLOCK), &bytes[..10_000], "queue");
}

fn a_file_that_nobody_has_is_taken_over(scene: &Scene<'_>) {
    let dir = &scene.dir;
    drop((dir.create_dir("a").unwrap(), dir.create_dir("b").unwrap()));
    drop(scene.data_file("a/f", &[1; 3 * BLOCK]));
    let Some(file) = dir.take_over("a/f", "b/g", 5 * BLOCK as u64).unwrap() else {
        #[cfg(any(test, feature = "test-support"))]
        crate::sys::testing::absent("leases", &"this file system does not report open files");
        return;
    };
    assert!(dir.stat("a/f").unwrap().is_none());
    let mut queue = scene.disk.queue(4).unwrap();
    write(&mut *queue, &file, 0, &[2; BLOCK]);
    file.set_len(2 * BLOCK as u64).unwrap();
    file.sync().unwrap();
    drop((file, queue));
    let now = [[2; BLOCK], [1; BLOCK]].concat();
    assert_eq!(dir.read_file("b/g", 1 << 20).unwrap(), now);
    let open = dir.open_file("b/g").unwrap();
    assert!(dir.take_over("b/g", "a/f", 0).unwrap().is_none(), "somebody has it open");
    drop(open);
    dir.write_file("a/f", b"there").unwrap();
    assert!(dir.take_over("b/g", "a/f", 0).is_err_and(|error| error.already_exists()));
    assert!(dir.take_over("a/missing", "a/new", 0).is_err_and(|error| error.is_not_found()));
    assert_eq!(dir.read_file("b/g", 1 << 20).unwrap(), now);
    assert_eq!(dir.read_file("a/f", 16).unwrap(), b"there");
}

fn an_existing_file_is_opened_for_writing_over_its_content(scene: &Scene<'_>) {
    let dir = &scene.dir;
    assert!(dir.overwrite_file("f", 0).is_err_and(|error| error.is_not_found()));
    drop(scene.data_file("f", &[1; 3 * BLOCK]));
    let file = dir.overwrite_file("f", 4 * BLOCK as u64).unwrap();
    // A disk without fallocate leaves the length as it was.
    file.set_len(4 * BLOCK as u64).unwrap();
    let mut queue = scene.disk.queue(4).unwrap();
    write(&mut *queue, &file, BLOCK, &[2; BLOCK]);
    file.sync().unwrap();
    drop((file, queue));
    let now = [[1; BLOCK], [2; BLOCK], [1; BLOCK], [0; BLOCK]].concat();
    assert_eq!(dir.read_file("f", 1 << 20).unwrap(), now);
}

fn sections_of_a_file_are_files(scene: &Scene<'_>) {
    let long = 3 * BLOCK as u64;
    let mut sections = Vec::new();
    for number in 0..3 {
        let (file, first) = scene.dir.extend_file("f", long).unwrap();
        assert_eq!(first, number * SECTION_ALIGNMENT, "each behind the last");
        sections.push(Arc::new(Section::new(file, first, long)) as Arc<dyn File>);
    }
    let mut queue = scene.disk.queue(4).unwrap();
    for (seed, section) in [1, 2, 3].into_iter().zip(&sections).rev() {
        assert_eq!(section.len().unwrap(), long);
        section.set_len(long).unwrap();
        assert!(section.set_len(long + 1).is_err(), "behind it is another's");
        write(queue.as_mut(), section, 0, &pattern(long as usize, seed));
        section.sync().unwrap();
    }
    let all = scene.dir.open_file("f").unwrap();
    assert_eq!(all.len().unwrap(), 2 * SECTION_ALIGNMENT + long);
    for (seed, number) in (1..).zip(0..3) {
        let expected = pattern(long as usize, seed);
        let first = number * SECTION_ALIGNMENT;
        let section: Arc<dyn File> = Arc::new(Section::new(Arc::clone(&all), first, long));
        assert_bytes(&section.read_at(0, usize::MAX).unwrap(), &expected, "all");
        assert_bytes(&section.read_at(5, 100).unwrap(), &expected[5..105], "inside");
        assert_bytes(&section.read_at(long - 3, 100).unwrap(), &expected[expected.len() - 3..], "at its end");
        for how in READS {
            assert_bytes(&read(queue.as_mut(), how, &section, BLOCK, 2 * BLOCK), &expected[BLOCK..], how);
        }
    }
    let cut = Section::new(Arc::clone(&all), 2 * SECTION_ALIGNMENT, long + 1);
    assert_eq!(cut.len().unwrap(), long, "no more than there is");
    assert_eq!(Section::new(all, 9 * SECTION_ALIGNMENT, long).len().unwrap(), 0);
}

fn read_at_takes_any_offset(scene: &Scene<'_>) {
    let bytes = pattern((5 << 20) + 123, 9);
    scene.data_file("f", &bytes);
    let file = scene.dir.open_file("f").unwrap();
    for offset in [0, 1, 511, 4095, 4096, 4097, (2 << 20) - 1, (5 << 20) + 100, (5 << 20) + 122] {
        for len in [0, 1, 7, 4096, 5000, (2 << 20) + 1, 4 << 20] {
            let found = file.read_at(offset as u64, len).unwrap();
            assert_bytes(&found, &bytes[offset..(offset + len).min(bytes.len())], (offset, len));
        }
    }
    for beyond in [bytes.len() as u64, bytes.len() as u64 + 1, 1 << 40, u64::MAX] {
        assert_eq!(file.read_at(beyond, 100).unwrap(), b"", "at {beyond}");
    }
    assert_eq!(file.read_at(10, usize::MAX).unwrap().len(), bytes.len() - 10, "no more memory than bytes");
}

fn cutting_and_growing_leaves_zeros(scene: &Scene<'_>) {
    let bytes = pattern(4 * BLOCK, 4);
    let file = scene.data_file("f", &bytes);
    file.set_len(5000).unwrap();
    file.set_len((4 * BLOCK) as u64).unwrap();
    file.sync().unwrap();
    let mut expected = vec![0; 4 * BLOCK];
    expected[..5000].copy_from_slice(&bytes[..5000]);
    let mut queue = scene.disk.queue(1).unwrap();
    for how in READS {
        assert_bytes(&read(queue.as_mut(), how, &file, 0, 8 * BLOCK), &expected, how);
    }
    assert_bytes(&file.read_at(4990, 20).unwrap(), &expected[4990..5010], "read_at");
}

fn a_transfer_touches_its_bytes_only(scene: &Scene<'_>) {
    let bytes = pattern(4 * BLOCK, 5);
    let file = scene.data_file("f", &bytes);
    let mut queue = scene.disk.queue(1).unwrap();
    let mut buffer = Buffer::alone(4 * BLOCK).unwrap();
    buffer.fill(0xAB);
    queue.submit(Transfer::Read, &file, BLOCK as u64, BLOCK, buffer, 1);
    let mut buffer = finish(queue.as_mut()).buffer;
    assert_bytes(&buffer[..BLOCK], &bytes[BLOCK..2 * BLOCK], "read");
    assert!(buffer[BLOCK..].iter().all(|&byte| byte == 0xAB), "memory behind the read was touched");
    buffer.fill(0xCD);
    queue.submit(Transfer::Write, &file, BLOCK as u64, BLOCK, buffer, 2);
    assert_eq!(finish(queue.as_mut()).result.unwrap(), BLOCK);
    let mut expected = bytes;
    expected[BLOCK..2 * BLOCK].fill(0xCD);
    assert_bytes(&file.read_at(0, 4 * BLOCK).unwrap(), &expected, "write");
    // Of no bytes at all.
    queue.submit(Transfer::Write, &file, BLOCK as u64, 0, Buffer::alone(BLOCK).unwrap(), 3);
    assert_eq!(finish(queue.as_mut()).result.unwrap(), 0);
    queue.submit(Transfer::Read, &file, 0, 0, Buffer::alone(BLOCK).unwrap(), 4);
    assert_eq!(finish(queue.as_mut()).result.unwrap(), 0);
    assert_bytes(&file.read_at(0, 4 * BLOCK).unwrap(), &expected, "nothing");
}

fn many_in_flight_come_back_once(scene: &Scene<'_>) {
    const SIZE: usize = 16 * BLOCK;
    for (depth, count) in [(1, 8), (3, 16), (16, 64)] {
        let bytes = pattern(count * SIZE, depth as u64);
        let name = format!("f{depth}");
        let file = scene.dir.create_file(&name, bytes.len() as u64).unwrap();
        let mut queue = scene.disk.queue(depth).unwrap();
        for how in [Transfer::Write, Transfer::Read, Transfer::ReadCached] {
            let mut free = buffers(depth, SIZE);
            let mut seen = vec![false; count];
            // Backwards, so that no engine profits from order.
            let mut todo: Vec<usize> = (0..count).collect();
            while !todo.is_empty() || queue.in_flight() > 0 {
                while !free.is_empty() && !todo.is_empty() {
                    let (mut buffer, i) = (free.pop().unwrap(), todo.pop().unwrap());
                    let range = i * SIZE..(i + 1) * SIZE;
                    if how == Transfer::Write {
                        buffer.copy_from_slice(&bytes[range]);
                    }
                    queue.submit(how, &file, (i * SIZE) as u64, SIZE, buffer, i as u64);
                }
                assert!(queue.in_flight() > 0 && queue.in_flight() <= depth);
                let done = finish(queue.as_mut());
                let i = done.token as usize;
                assert!(!std::mem::replace(&mut seen[i], true), "transfer {i} came back twice");
                assert_eq!(done.result.unwrap(), SIZE);
                if how != Transfer::Write {
                    assert_bytes(&done.buffer, &bytes[i * SIZE..(i + 1) * SIZE], (how, i));
                }
                free.push(done.buffer);
            }
            assert!(seen.iter().all(|&seen| seen));
        }
        assert_bytes(&file.read_at(0, bytes.len()).unwrap(), &bytes, depth);
    }
}

fn a_full_queue_takes_more(scene: &Scene<'_>) {
    let file = scene.dir.create_file("f", 0).unwrap();
    let mut queue = scene.disk.queue(2).unwrap();
    for (i, buffer) in buffers(10, BLOCK).into_iter().enumerate() {
        // It may wait for those before, but it takes each one.
        queue.submit(Transfer::Write, &file, (i * BLOCK) as u64, BLOCK, buffer, i as u64);
    }
    assert_eq!(queue.in_flight(), 10);
    let mut tokens: Vec<u64> = (0..10).map(|_| finish(queue.as_mut()).token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..10).collect::<Vec<_>>());
    assert_eq!(queue.in_flight(), 0);
}

fn an_idle_queue_answers_at_once(scene: &Scene<'_>) {
    let mut queue = scene.disk.queue(4).unwrap();
    let start = Instant::now();
    assert!(queue.complete(PATIENCE).is_none());
    assert!(queue.complete(Duration::MAX).is_none());
    assert!(start.elapsed() < PATIENCE / 2);
    assert_eq!(queue.in_flight(), 0);
}

fn errors_give_the_buffer_back(scene: &Scene<'_>) {
    let bytes = pattern(2 * BLOCK, 6);
    let file = scene.data_file("f", &bytes);
    let read_only = scene.dir.open_file("f").unwrap();
    let mut queue = scene.disk.queue(2).unwrap();
    let mut buffer = Buffer::alone(BLOCK).unwrap();
    buffer.fill(0x5A);
    let address = buffer.as_ptr();

    queue.submit(Transfer::Write, &read_only, 0, BLOCK, buffer, 1);
    let done = finish(queue.as_mut());
    assert_eq!((done.token, done.buffer.as_ptr(), done.buffer[0]), (1, address, 0x5A));
    assert_errno(done.result, &[EBADF], "f");

    queue.submit(Transfer::Write, &file, 0, 2 * BLOCK, done.buffer, 2);
    let done = finish(queue.as_mut());
    assert_eq!((done.token, done.buffer.as_ptr()), (2, address));
    assert!(matches!(done.result, Err(Error::Internal { .. })), "longer than the buffer");

    queue.submit(Transfer::Write, &file, u64::MAX - u64::MAX % BLOCK as u64, BLOCK, done.buffer, 3);
    let done = finish(queue.as_mut());
    assert!(done.result.is_err(), "no file reaches that far");

    let alignment = scene.disk.choice().alignment;
    assert!(alignment >= 1 && BLOCK.is_multiple_of(alignment));
    if alignment > 1 {
        queue.submit(Transfer::Write, &file, 1, BLOCK, done.buffer, 4);
        let done = finish(queue.as_mut());
        assert!(matches!(done.result, Err(Error::Internal { .. })), "an odd offset");
        queue.submit(Transfer::Read, &file, 0, BLOCK - 1, done.buffer, 5);
        assert!(matches!(finish(queue.as_mut()).result, Err(Error::Internal { .. })), "an odd length");
    }
    assert_eq!(queue.in_flight(), 0);
    assert_bytes(&file.read_at(0, 2 * BLOCK).unwrap(), &bytes, "nothing was written");
}

fn a_dropped_queue_frees_its_memory(scene: &Scene<'_>) {
    let file = scene.dir.create_file("f", 0).unwrap();
    let mut queue = scene.disk.queue(8).unwrap();
    let buffers = buffers(8, 64 * BLOCK);
    let mapping = Arc::downgrade(buffers[0].mapping());
    for (i, buffer) in buffers.into_iter().enumerate() {
        queue.submit(Transfer::Write, &file, (i * 64 * BLOCK) as u64, 64 * BLOCK, buffer, i as u64);
    }
    drop(queue);
    assert!(mapping.upgrade().is_none(), "something still holds memory of a queue that is gone");
    // Nothing is in flight any more: what is written now stays.
    let bytes = pattern(64 * BLOCK, 8);
    let mut queue = scene.disk.queue(1).unwrap();
    for i in 0..8 {
        write(queue.as_mut(), &file, i * 64 * BLOCK, &bytes);
    }
    for i in 0..8 {
        assert_bytes(&file.read_at((i * 64 * BLOCK) as u64, 64 * BLOCK).unwrap(), &bytes, i);
    }
}

fn queues_work_side_by_side(scene: &Scene<'_>) {
    const PART: usize = 64 * BLOCK;
    let bytes = pattern(4 * PART, 10);
    let file = scene.dir.create_file("f", bytes.len() as u64).unwrap();
    std::thread::scope(|threads| {
        for part in 0..4 {
            let (file, bytes) = (&file, &bytes[part * PART..(part + 1) * PART]);
            let mut queue = scene.disk.queue(3).unwrap();
            threads.spawn(move || {
                for (i, block) in bytes.chunks(8 * BLOCK).enumerate() {
                    write(queue.as_mut(), file, part * PART + i * 8 * BLOCK, block);
                }
                let found = read(queue.as_mut(), Transfer::Read, file, part * PART, PART);
                assert_bytes(&found, bytes, part);
            });
        }
    });
    assert_bytes(&file.read_at(0, bytes.len()).unwrap(), &bytes, "all parts");
}

fn a_queue_moves_between_threads(scene: &Scene<'_>) {
    let bytes = pattern(64 * BLOCK, 11);
    let file = scene.dir.create_file("f", 0).unwrap();
    let mut queue = scene.disk.queue(2).unwrap();
    write(queue.as_mut(), &file, 0, &bytes);
    let mut buffer = Buffer::alone(bytes.len()).unwrap();
    buffer.fill(0);
    queue.submit(Transfer::Read, &file, 0, bytes.len(), buffer, 5);
    // With a transfer in flight: begun by one thread, finished by another, dropped by a third.
    let (found, queue) = std::thread::scope(|threads| {
        let other = threads.spawn(move || {
            let found = finish(queue.as_mut());
            queue.submit(Transfer::Read, &file, 0, BLOCK, Buffer::alone(BLOCK).unwrap(), 6);
            (found, queue)
        });
        other.join().unwrap()
    });
    assert_bytes(&found.buffer, &bytes, "read");
    drop(queue);
}

fn an_open_file_outlives_its_name(scene: &Scene<'_>) {
    let bytes = pattern(3 * BLOCK + 5, 12);
    scene.data_file("f", &bytes);
    let file = scene.dir.open_file("f").unwrap();
    scene.dir.remove_file("f").unwrap();
    scene.data_file("f", b"another");
    let mut queue = scene.disk.queue(1).unwrap();
    for how in READS {
        assert_bytes(&read(queue.as_mut(), how, &file, 0, 4 * BLOCK), &bytes, how);
    }
    assert_bytes(&file.read_at(0, 1 << 20).unwrap(), &bytes, "read_at");
    assert_eq!(file.len().unwrap(), bytes.len() as u64);
}

fn registered_memory_works(scene: &Scene<'_>) {
    let mapping = Mapping::new(8 << 20).unwrap();
    let weak = Arc::downgrade(&mapping);
    let mut ours = mapping.into_buffers(1 << 20).unwrap();
    // A refusal (a limit on locked memory) costs speed only.
    let _ = scene.disk.register(&[Arc::clone(ours[0].mapping())]);
    let bytes = pattern(1 << 20, 13);
    let file = scene.dir.create_file("f", 0).unwrap();
    let mut queue = scene.disk.queue(4).unwrap();
    let foreign = Buffer::alone(1 << 20).unwrap();
    ours.truncate(3);
    for (i, mut buffer) in ours.into_iter().chain([foreign]).enumerate() {
        buffer.copy_from_slice(&bytes);
        queue.submit(Transfer::Write, &file, (i << 20) as u64, 1 << 20, buffer, i as u64);
    }
    let written: Vec<_> = (0..4).map(|_| finish(queue.as_mut())).collect();
    for mut done in written {
        assert_eq!(done.result.unwrap(), 1 << 20);
        done.buffer.fill(0);
        queue.submit(Transfer::Read, &file, done.token << 20, 1 << 20, done.buffer, done.token);
    }
    for _ in 0..4 {
        let done = finish(queue.as_mut());
        assert_eq!(done.result.unwrap(), 1 << 20);
        assert_bytes(&done.buffer, &bytes, done.token);
    }
    drop(queue);
    assert!(weak.upgrade().is_none(), "announcing memory keeps none of it alive");
}

fn any_sequence_matches_a_model(scene: &Scene<'_>) {
    const BLOCKS: u64 = 64;
    let mut state = 0x1234_5678_9ABC_DEF1_u64;
    let mut next = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % below
    };
    let file = scene.dir.create_file("f", 0).unwrap();
    let mut queue = scene.disk.queue(2).unwrap();
    let mut model: Vec<u8> = Vec::new();
    for step in 0..300 {
        let (start, len) = (next(BLOCKS) as usize * BLOCK, (1 + next(8)) as usize * BLOCK);
        match next(5) {
            0 | 1 => {
                let bytes = pattern(len, step);
                write(queue.as_mut(), &file, start, &bytes);
                model.resize(model.len().max(start + len), 0);
                model[start..start + len].copy_from_slice(&bytes);
            }
            2 => {
                let len = next(BLOCKS * BLOCK as u64);
                file.set_len(len).unwrap();
                model.resize(len as usize, 0);
            }
            3 => {
                let offset = start + next(BLOCK as u64) as usize;
                let expected = &model[offset.min(model.len())..(offset + len).min(model.len())];
                assert_bytes(&file.read_at(offset as u64, len).unwrap(), expected, (step, offset, len));
            }
            _ => {
                let how = READS[next(2) as usize];
                let expected = &model[start.min(model.len())..(start + len).min(model.len())];
                let found = read(queue.as_mut(), how, &file, start, len);
                assert_bytes(&found, expected, (step, how, start, len));
            }
        }
        assert_eq!(file.len().unwrap(), model.len() as u64);
    }
    file.sync().unwrap();
    assert_bytes(&scene.dir.read_file("f", 1 << 30).unwrap(), &model, "at the end");
}
