//! Reads and writes in flight. A transfer takes effect when it completes; until then a crash may
//! have kept any part of a write.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::context::{Context, failed};
use super::faults::{Action, OperationKind};
use super::handles::SimFile;
use super::image::mix;
use super::log::Op;
use super::world::{Answer, World};
use crate::io::{Completion, File, Queue, Transfer};
use crate::sys::Buffer;
use crate::{Error, Result};

pub(super) struct SimQueue {
    context: Arc<Context>,
    depth: usize,
    /// 0: transfers complete in the order of submission.
    seed: u64,
    flying: Vec<Flying>,
    done: VecDeque<Completion>,
    stalled: Vec<Flying>,
}

struct Flying {
    transfer: Transfer,
    file: Arc<dyn File>,
    offset: u64,
    len: usize,
    buffer: Buffer,
    token: u64,
    /// The number of this write in the log.
    id: u64,
}

/// How a transfer goes on after one operation.
enum Step {
    Finished(usize),
    /// This many bytes are through; the rest follows.
    Partly(usize),
    Stalled,
}

impl SimQueue {
    pub(super) fn new(context: Arc<Context>, depth: usize, seed: u64) -> Self {
        Self {
            context,
            depth: depth.max(1),
            seed,
            flying: Vec::new(),
            done: VecDeque::new(),
            stalled: Vec::new(),
        }
    }

    /// Lets one transfer in flight take effect.
    fn advance(&mut self) {
        let place = if self.seed == 0 {
            0
        } else {
            self.seed = mix(self.seed, 0x6f72_6465);
            (self.seed % self.flying.len().max(1) as u64) as usize
        };
        if place >= self.flying.len() {
            return;
        }
        let mut flying = self.flying.remove(place);
        let mut at = 0;
        loop {
            match self.step(&mut flying, at) {
                Ok(Step::Partly(more)) => at += more,
                Ok(Step::Stalled) => return self.stalled.push(flying),
                Ok(Step::Finished(len)) => return self.finish(flying, Ok(len)),
                Err(error) => return self.finish(flying, Err(error)),
            }
        }
    }

    fn finish(&mut self, flying: Flying, result: Result<usize>) {
        self.done.push_back(Completion { token: flying.token, buffer: flying.buffer, result });
    }

    fn step(&self, flying: &mut Flying, at: usize) -> Result<Step> {
        let Some(file) = flying.file.as_any().downcast_ref::<SimFile>() else {
            return Err(Error::internal("a file of this engine", "one of another"));
        };
        let (ino, offset, len, id) = (file.ino(), flying.offset, flying.len, flying.id);
        let path = flying.file.path().to_path_buf();
        if flying.transfer == Transfer::Write {
            let data = flying.buffer.get(..len).unwrap_or_default();
            return self.context.perform_with(OperationKind::Write, "write", &path, |world, action| {
                write_step(world, action, id, ino, offset, data, at)
            });
        }
        let window = flying.buffer.get_mut(..len).unwrap_or_default();
        self.context.perform_with(OperationKind::Read, "read", &path, |world, action| {
            let bytes = world.read(ino, offset, len)?;
            let count = match action {
                Some(Action::Fail(errno) | Action::FailHalfway(errno) | Action::FailAfterwards(errno)) => {
                    return Err(errno);
                }
                Some(Action::Stall) => return Ok(Step::Stalled),
                Some(Action::Short) if at < bytes.len() / 2 => bytes.len() / 2,
                Some(Action::Short) | None => bytes.len(),
            };
            if let (Some(to), Some(from)) = (window.get_mut(..count), bytes.get(..count)) {
                to.copy_from_slice(from);
            }
            Ok(if count < bytes.len() { Step::Partly(count - at) } else { Step::Finished(count) })
        })
    }

    fn refuse(
        &self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        room: usize,
    ) -> Option<Error> {
        let Some(sim) = file.as_any().downcast_ref::<SimFile>() else {
            return Some(Error::internal("a file of this engine", "one of another"));
        };
        if len > room {
            return Some(Error::internal(
                format!("at most {room} bytes, as the buffer has"),
                len.to_string(),
            ));
        }
        let alignment = self.context.choice.alignment.max(1);
        let aligned = len.is_multiple_of(alignment) && offset.is_multiple_of(alignment as u64);
        if !aligned && transfer != Transfer::ReadCached {
            return Some(Error::internal(
                format!("a transfer aligned to {alignment}"),
                format!("offset {offset}, length {len}"),
            ));
        }
        if transfer == Transfer::Write && !sim.writable() {
            return Some(failed("write", file.path(), libc::EBADF));
        }
        None
    }

    /// Notes in the log that a write may reach the disk from here on; gives its number.
    fn note(&self, path: &Path, ino: u64, offset: u64, data: &[u8]) -> Result<u64> {
        let mut world = self.context.world();
        if world.is_killed(self.context.process) {
            return Err(failed("write", path, super::KILLED));
        }
        let id = world.fresh_id();
        world.record(Op::Submit { id, ino, offset, data: Arc::from(data) }, ino);
        Ok(id)
    }
}

/// One operation of a write: the bytes from `at` on, or a part of them.
fn write_step(
    world: &mut World,
    action: Option<Action>,
    id: u64,
    ino: u64,
    offset: u64,
    data: &[u8],
    at: usize,
) -> Answer<Step> {
    let rest = data.get(at..).unwrap_or_default();
    let here = offset + at as u64;
    let half = rest.get(..rest.len() / 2).unwrap_or_default();
    match action {
        Some(Action::Fail(errno)) => return Err(errno),
        // The log keeps the whole write in flight, so it covers any part that a crash leaves.
        Some(Action::FailHalfway(errno)) => return world.put(ino, here, half).and(Err(errno)),
        Some(Action::FailAfterwards(errno)) => {
            world.put(ino, here, rest)?;
            world.record(Op::Complete { id, ino }, ino);
            return Err(errno);
        }
        Some(Action::Stall) => return Ok(Step::Stalled),
        Some(Action::Short) if !half.is_empty() => return world.put(ino, here, half).map(Step::Partly),
        Some(Action::Short) | None => {}
    }
    let put = world.put(ino, here, rest)?;
    if put < rest.len() {
        return Ok(Step::Partly(put));
    }
    world.record(Op::Complete { id, ino }, ino);
    Ok(Step::Finished(data.len()))
}

impl Queue for SimQueue {
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) {
        // Terminates: each pass takes one transfer out of flight, or stalls it permanently.
        while self.flying.len() >= self.depth {
            self.advance();
        }
        let mut id = 0;
        let offset = file.base().saturating_add(offset);
        let mut refused = self.refuse(transfer, file, offset, len, buffer.len());
        if refused.is_none() && transfer == Transfer::Write {
            let ino = file.as_any().downcast_ref::<SimFile>().map_or(0, SimFile::ino);
            match self.note(file.path(), ino, offset, buffer.get(..len).unwrap_or_default()) {
                Ok(noted) => id = noted,
                Err(error) => refused = Some(error),
            }
        }
        let flying = Flying { transfer, file: Arc::clone(file), offset, len, buffer, token, id };
        match refused {
            Some(error) => self.finish(flying, Err(error)),
            None => self.flying.push(flying),
        }
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        while self.done.is_empty() && !self.flying.is_empty() {
            self.advance();
        }
        let done = self.done.pop_front();
        if done.is_none() && !self.stalled.is_empty() {
            std::thread::sleep(timeout);
        }
        done
    }

    fn in_flight(&self) -> usize {
        self.flying.len() + self.done.len() + self.stalled.len()
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        // Transfers in flight take effect. Stalled ones stay stalled.
        while !self.flying.is_empty() {
            self.advance();
        }
    }
}
