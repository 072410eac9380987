//! An output in an object store. A store cannot rename, so there is no temporary name: an object
//! appears when it is whole. The leader writes the files without tensors last. By these, readers
//! find the others. A conversion that was interrupted begins again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use stepwell_core::io::{Dir, Disk};

use super::OutputKind;
use super::file_plan::{ConversionPlan, NO_OWNER, PieceContent, PlannedFile};
use super::writer::OutputFile;
use crate::delete_tree::DELETED_AT_ONCE;
use crate::directory_layout::EXPORT_RECORD;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::root::{PathKind, path_kind};
use crate::singular;

/// See the module documentation.
pub(super) struct StoreOutput {
    /// The prefix of the files.
    dir: Arc<dyn Dir>,
    path: PathBuf,
    /// The names of the files in the order of the plan.
    names: Vec<String>,
    /// True for an export in a directory. Its record is there already, and stays.
    has_record: bool,
}

impl StoreOutput {
    /// Returns the place of an output, without a request. Divides the plan: the second part has the
    /// files without tensors.
    pub(super) fn new(
        disk: &dyn Disk,
        path: &Path,
        kind: OutputKind,
        plan: &mut ConversionPlan,
    ) -> Result<(Self, Vec<PlannedFile>)> {
        let (parent, name) = singular::split(path)?;
        let dir = match kind {
            OutputKind::Directory => disk.open_foreign_dir(path)?,
            OutputKind::File => disk.open_foreign_dir(parent)?,
        };
        if kind == OutputKind::File {
            plan.files.iter_mut().for_each(|file| file.name.clone_from(&name));
        }
        let is_literal =
            |file: &PlannedFile| file.pieces.iter().all(|one| matches!(one.content, PieceContent::Bytes(_)));
        let (last, files): (Vec<_>, Vec<_>) =
            std::mem::take(&mut plan.files).into_iter().partition(is_literal);
        let names = files.iter().chain(&last).map(|file| file.name.clone()).collect();
        plan.files = files;
        let has_record = plan.owner != NO_OWNER && kind == OutputKind::Directory;
        Ok((Self { dir, path: path.to_owned(), names, has_record }, last))
    }

    /// Fails if something is there, or if the output would be in a root or in a checkpoint.
    pub(super) fn check_free(&self, environment: &Environment) -> Result<()> {
        let (parent, name) = singular::split(&self.path)?;
        let path = self.path.display();
        let is_taken = if self.has_record {
            let found = self.dir.lengths("")?.unwrap_or_default();
            !found.into_keys().eq([EXPORT_RECORD])
        } else {
            environment.disk.open_foreign_dir(parent)?.stat(&name)?.is_some()
        };
        if is_taken {
            return Err(Error::Invalid(format!(
                "{path} exists already. Pass a free URL, or delete what is there"
            )));
        }
        match path_kind(environment, parent)? {
            PathKind::Root => Err(Error::Invalid(format!(
                "{path} would be beside the steps of a root. Pass a URL outside it, or with a name in between"
            ))),
            PathKind::Checkpoint => {
                Err(Error::Invalid(format!("{path} would be inside a checkpoint. Pass a URL outside it")))
            }
            PathKind::Absent | PathKind::Directory => Ok(()),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn dir(&self) -> Arc<dyn Dir> {
        Arc::clone(&self.dir)
    }

    /// Returns the files with tensors.
    pub(super) fn files(plan: &ConversionPlan) -> Vec<OutputFile> {
        let file = |file: &PlannedFile| OutputFile { name: file.name.clone(), length: file.length };
        plan.files.iter().map(file).collect()
    }

    /// Writes the files without tensors.
    pub(super) fn write_last(&self, last: &[PlannedFile]) -> Result<()> {
        for file in last {
            self.dir.write_file(&file.name, &bytes_of(file)?)?;
        }
        Ok(())
    }

    /// Deletes what was written.
    pub(super) fn give_up(&self) -> Result<()> {
        for some in self.names.chunks(DELETED_AT_ONCE) {
            self.dir.remove_files(some)?;
        }
        Ok(())
    }
}

/// Returns the bytes of a file without tensors.
fn bytes_of(file: &PlannedFile) -> Result<Vec<u8>> {
    let wrong = || Error::internal("literal bytes", format!("other pieces of {}", file.name));
    let mut bytes = vec![0; usize::try_from(file.length).map_err(|_| wrong())?];
    for piece in &file.pieces {
        let PieceContent::Bytes(content) = &piece.content else { return Err(wrong()) };
        let at = usize::try_from(piece.offset).map_err(|_| wrong())?;
        bytes.get_mut(at..at + content.len()).ok_or_else(wrong)?.copy_from_slice(content);
    }
    Ok(bytes)
}
