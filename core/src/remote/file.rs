//! An object as a file: one that is stored, or one that is uploaded in parts.
//!
//! Bytes come in any order. A write of exactly one part goes straight to the store. Other bytes
//! (the end of the data and the footer, and all bytes if parts have another length than writes) are
//! copied once. They wait until they fill a part, or until the file ends. So no write waits for
//! another one.

use std::any::Any;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::disk::MAX_PARTS;
use super::store::{PartTag, Store, UploadId};
use crate::io::File;
use crate::sys::Buffer;
use crate::{Error, Result};

/// A part that begins with a shorter piece gets memory for that piece only. It may be the end of
/// the file.
const SMALL_PIECE: usize = 1 << 20;

/// See the module documentation.
pub(super) struct StoreFile {
    store: Arc<dyn Store>,
    key: String,
    path: PathBuf,
    part_bytes: u64,
    state: Mutex<FileState>,
}

enum FileState {
    /// It is stored, with this length.
    Stored(u64),
    Uploading(Upload),
    /// An upload has failed, for this reason.
    Failed(String),
}

#[derive(Default)]
struct Upload {
    /// Given by the store when the first part is sent.
    id: Option<UploadId>,
    /// The stored parts, by their number from 0 on.
    parts: BTreeMap<u64, PartTag>,
    /// Parts that wait for bytes, by their number from 0 on.
    filling: BTreeMap<u64, PendingPart>,
    /// The length, if it was set.
    len: Option<u64>,
}

/// A part that waits for bytes.
struct PendingPart {
    buffer: Buffer,
    /// The lengths of the pieces that are there, by their offset in the part.
    pieces: BTreeMap<usize, usize>,
}

impl PendingPart {
    /// Memory for a piece that ends at `end` of a part of this length.
    fn buffer(end: usize, len: usize, part_bytes: usize) -> Result<Buffer> {
        Buffer::alone(if len < SMALL_PIECE { end } else { part_bytes })
    }

    /// Adds a piece.
    fn add(&mut self, at: usize, piece: &[u8], part_bytes: usize) -> Result<()> {
        let end = at + piece.len();
        if self.buffer.len() < end {
            let mut longer = Buffer::alone(part_bytes)?;
            longer.get_mut(..self.buffer.len()).unwrap_or_default().copy_from_slice(&self.buffer);
            self.buffer = longer;
        }
        self.buffer.get_mut(at..end).unwrap_or_default().copy_from_slice(piece);
        self.pieces.insert(at, piece.len());
        Ok(())
    }

    /// The bytes from the start of the part on that are there.
    fn filled(&self) -> usize {
        let mut filled = 0;
        for (&at, &len) in &self.pieces {
            if at > filled {
                break;
            }
            filled = filled.max(at + len);
        }
        filled
    }
}

impl StoreFile {
    /// A stored object.
    pub(super) fn stored(store: &Arc<dyn Store>, key: String, path: PathBuf, len: u64) -> Self {
        let state = Mutex::new(FileState::Stored(len));
        Self { store: Arc::clone(store), key, path, part_bytes: 0, state }
    }

    /// An object that is made. It is there after [`File::sync`].
    pub(super) fn upload(
        store: &Arc<dyn Store>,
        key: String,
        path: PathBuf,
        part_bytes: u64,
        len_hint: u64,
    ) -> Self {
        let part_bytes = part_bytes.max(1);
        let part_bytes = part_bytes * len_hint.div_ceil(part_bytes * MAX_PARTS).max(1);
        let state = Mutex::new(FileState::Uploading(Upload::default()));
        Self { store: Arc::clone(store), key, path, part_bytes, state }
    }

    pub(super) fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    fn state(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `act` with the upload.
    fn with<T>(&self, act: impl FnOnce(&mut Upload) -> Result<T>) -> Result<T> {
        match &mut *self.state() {
            FileState::Uploading(upload) => act(upload),
            FileState::Stored(_) => Err(self.misused("a write after the upload has ended")),
            FileState::Failed(why) => {
                let why = std::io::Error::other(format!("the upload has failed: {why}"));
                Err(Error::io("write", &self.path, why))
            }
        }
    }

    fn misused(&self, found: impl Into<String>) -> Error {
        Error::internal(format!("an upload of {} that is under way", self.path.display()), found)
    }

    /// Writes the first `len` bytes of a buffer. Returns the buffer.
    pub(super) fn write(&self, offset: u64, buffer: Buffer, len: usize) -> (Buffer, Result<usize>) {
        let part = offset / self.part_bytes.max(1);
        if len as u64 == self.part_bytes && offset.is_multiple_of(self.part_bytes) {
            let (buffer, stored) = self.send(part, buffer, len);
            return (buffer, stored.map(|()| len));
        }
        let kept = self.keep(offset, buffer.get(..len).unwrap_or_default());
        (buffer, kept.map(|()| len))
    }

    /// Keeps bytes, and sends the parts that they fill.
    fn keep(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let part = at / self.part_bytes;
            let (begin, end) = (part * self.part_bytes, (part + 1) * self.part_bytes);
            let (piece, after) = rest.split_at_checked((end - at) as usize).unwrap_or((rest, &[]));
            let whole =
                self.with(|upload| upload.add(part, (at - begin) as usize, piece, self.part_bytes))?;
            if let Some(whole) = whole {
                self.send(part, whole, self.part_bytes as usize).1?;
            }
            (at, rest) = (end, after);
        }
        Ok(())
    }

    /// Returns the upload, and starts it at first. A failure is remembered: other parts wait for
    /// the same answer.
    fn started(&self) -> Result<Option<UploadId>> {
        let mut state = self.state();
        if let FileState::Uploading(upload) = &mut *state
            && upload.id.is_none()
        {
            match self.store.start_upload(&self.key) {
                Ok(id) => upload.id = Some(id),
                Err(error) => {
                    *state = FileState::Failed(error.to_string());
                    return Err(error);
                }
            }
        }
        drop(state);
        self.with(|upload| Ok(upload.id.clone()))
    }

    /// Sends a part.
    fn send(&self, part: u64, buffer: Buffer, len: usize) -> (Buffer, Result<()>) {
        let id = self.started();
        let (id, number) = match (id, u32::try_from(part + 1)) {
            (Ok(Some(id)), Ok(number)) => (id, number),
            (Err(error), _) => return (buffer, Err(error)),
            _ => return (buffer, Err(self.misused(format!("part {part}")))),
        };
        let (buffer, tag) = self.store.put_part(&self.key, &id, number, buffer, len);
        let noted = tag.and_then(|tag| {
            self.with(|upload| {
                upload.parts.insert(part, tag);
                Ok(())
            })
        });
        (buffer, noted)
    }

    /// Sends what is left, and makes the object.
    fn finish(&self) -> Result<u64> {
        let (id, len, mut filling) = self.with(|upload| {
            let len = upload.len.unwrap_or_else(|| upload.end(self.part_bytes));
            Ok((upload.id.clone(), len, std::mem::take(&mut upload.filling)))
        })?;
        let (last, tail) = (len / self.part_bytes, (len % self.part_bytes) as usize);
        let rest = filling.remove(&last);
        let filled = rest.as_ref().map_or(0, PendingPart::filled);
        if filled < tail || filling.keys().any(|part| *part < last) || (id.is_none() && last > 0) {
            return Err(self.misused(format!("a hole before byte {len}")));
        }
        let Some(id) = id else {
            let bytes = rest.as_ref().and_then(|rest| rest.buffer.get(..tail));
            self.store.put(&self.key, bytes.unwrap_or_default())?;
            return Ok(len);
        };
        if let Some(rest) = rest.filter(|_| tail > 0) {
            self.send(last, rest.buffer, tail).1?;
        }
        let parts = self.with(|upload| Ok(std::mem::take(&mut upload.parts)))?;
        if parts.keys().copied().ne(0..len.div_ceil(self.part_bytes)) {
            return Err(self.misused(format!("{} parts for {len} bytes", parts.len())));
        }
        let tags: Vec<PartTag> = parts.into_values().collect();
        if let Err(error) = self.store.complete_upload(&self.key, &id, &tags) {
            // Its answer may be lost. Nobody else writes this key.
            let found = self.store.look(&self.key)?;
            found.filter(|facts| facts.len == len).ok_or(error)?;
        }
        Ok(len)
    }
}

impl Upload {
    /// Adds a piece to a part. Returns the part if that is all of it.
    fn add(&mut self, part: u64, at: usize, piece: &[u8], part_bytes: u64) -> Result<Option<Buffer>> {
        let part_bytes = part_bytes as usize;
        let filling = match self.filling.entry(part) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(free) => {
                let buffer = PendingPart::buffer(at + piece.len(), piece.len(), part_bytes)?;
                free.insert(PendingPart { buffer, pieces: BTreeMap::new() })
            }
        };
        filling.add(at, piece, part_bytes)?;
        if filling.filled() < part_bytes {
            return Ok(None);
        }
        Ok(self.filling.remove(&part).map(|filling| filling.buffer))
    }

    /// The end of the bytes that are there.
    fn end(&self, part_bytes: u64) -> u64 {
        let sent = self.parts.last_key_value().map_or(0, |(part, _)| (part + 1) * part_bytes);
        let end = |(part, filling): (&u64, &PendingPart)| {
            let (at, len) = filling.pieces.last_key_value()?;
            Some(part * part_bytes + (at + len) as u64)
        };
        sent.max(self.filling.last_key_value().and_then(end).unwrap_or_default())
    }
}

impl File for StoreFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn len(&self) -> Result<u64> {
        match &*self.state() {
            FileState::Stored(len) => Ok(*len),
            FileState::Uploading(upload) => Ok(upload.len.unwrap_or_default()),
            FileState::Failed(_) => Err(self.misused("its length after it has failed")),
        }
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.with(|upload| {
            upload.len = Some(len);
            Ok(())
        })
    }

    fn sync(&self) -> Result<()> {
        let finished = self.finish();
        let state = match &finished {
            Ok(len) => FileState::Stored(*len),
            Err(error) => FileState::Failed(error.to_string()),
        };
        let before = std::mem::replace(&mut *self.state(), state);
        if finished.is_err() {
            self.abort(&before);
        }
        finished.map(drop)
    }

    fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let end = match &*self.state() {
            FileState::Stored(end) => *end,
            _ => return Err(self.misused("a read before it is stored")),
        };
        let mut bytes = vec![0; len.min(usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX))];
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.store.read(&self.key, offset + done as u64, rest)? {
                0 => break,
                read => done += read,
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }

    fn cached(&self, _: u64, _: u64) -> Option<u64> {
        None
    }

    fn is_object(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl StoreFile {
    /// Reads into the first `len` bytes of a buffer.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        self.store.read(&self.key, offset, into)
    }

    /// Deletes the parts of an upload that will not be completed. If that fails, the store's own
    /// rule for old uploads deletes them.
    fn abort(&self, state: &FileState) {
        let FileState::Uploading(Upload { id: Some(id), .. }) = state else { return };
        if let Err(error) = self.store.abort_upload(&self.key, id) {
            tracing::debug!(file = %self.path.display(), %error, "deleting the parts of an upload failed");
        }
    }
}

impl Drop for StoreFile {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.state(), FileState::Failed("it was dropped".to_owned()));
        self.abort(&state);
    }
}
