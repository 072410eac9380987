//! The arrays of a state: their memory is exported, not copied. Arrays with the same memory are
//! tied.

use std::sync::Arc;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use stepwell_core::dtype::Dtype;
use stepwell_core::leaf_path::Component;
use stepwell_core::region::Region;
use stepwell_manager::state::Holders;

use super::{Leaf, Shard, Walk};
use crate::arrays::ArrayType;
use crate::hooks::dtype_named;
use crate::ingest::{HeldBuffer, device_of};

impl<'py> Walk<'_, 'py> {
    /// Adds a `numpy.ndarray`.
    pub(super) fn array(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        array: &Bound<'py, PyAny>,
        depth: u64,
    ) -> PyResult<()> {
        if self.dtypes.of(self.hooks, array)?.is_some() {
            return self.store_array(parent, component, array, None);
        }
        // It is big-endian, and Python converts it. Or it cannot be stored, and is refused.
        self.other(parent, component, array, depth)
    }

    /// Adds an array, or a tie to an earlier one. If `array` is a converted copy, the memory of its
    /// `original` decides.
    pub(super) fn store_array(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        array: &Bound<'py, PyAny>,
        original: Option<HeldBuffer>,
    ) -> PyResult<()> {
        let Some(dtype) = self.dtypes.of(self.hooks, array)? else {
            return Err(self.refuse(parent, component, array.py(), "its dtype cannot be stored"));
        };
        let buffer = HeldBuffer::new(array, false)?;
        self.hold_array(parent, component, array.py(), (dtype, buffer, false), original)
    }

    /// Exports the memory of an array of a registered class. `None` for other objects, and for
    /// arrays that Python must describe.
    pub(super) fn hold(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Option<(Dtype, HeldBuffer, bool)>> {
        let arrays = Arc::clone(&self.arrays);
        let known = arrays.array(object);
        let Some(known) = known.filter(|known| known.is_whole(object)) else { return Ok(None) };
        self.hold_as(known, object)
    }

    /// Exports the memory of an array that is one piece of memory, through its registered class.
    fn hold_as(
        &mut self,
        known: &ArrayType,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Option<(Dtype, HeldBuffer, bool)>> {
        if known.buffer
            && let Ok(buffer) = HeldBuffer::new(object, false)
        {
            let dtype = self.dtypes.of(self.hooks, object)?;
            self.library = Some(Arc::clone(&known.library));
            return Ok(dtype.map(|dtype| (dtype, buffer, known.immutable)));
        }
        let capsule = match known.capsule.bind(object.py()).call1((object,)) {
            Ok(capsule) => capsule,
            Err(error) if error.is_instance_of::<PyException>(object.py()) => return Ok(None),
            // An interrupt, for example.
            Err(error) => return Err(error),
        };
        let Ok((dtype, buffer)) = HeldBuffer::of_capsule(capsule) else { return Ok(None) };
        // Without a CUDA driver, or with a layout that needs copies element by element, the package
        // copies the array.
        let Ok(device) = device_of(&buffer) else { return Ok(None) };
        if device.is_some() && (known.immutable || buffer.is_broadcast()) {
            return Ok(None);
        }
        self.library = Some(Arc::clone(&known.library));
        Ok(Some((dtype, buffer, known.immutable)))
    }

    /// Adds the leaf of an exported array, or a tie to an earlier leaf.
    pub(super) fn hold_array(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        py: Python<'py>,
        (dtype, buffer, immutable): (Dtype, HeldBuffer, bool),
        original: Option<HeldBuffer>,
    ) -> PyResult<()> {
        if self.is_left_out(parent, component.as_ref()) {
            return Ok(());
        }
        if buffer.itemsize() != dtype.size() {
            let why = format!("{} bytes per element, where {dtype} has {}", buffer.itemsize(), dtype.size());
            return Err(self.refuse(parent, component, py, &why));
        }
        if buffer.nbytes() > 0 {
            let identity = original.as_ref().unwrap_or(&buffer);
            let place = (identity.address() as usize, dtype, original.is_some());
            let same = self.ties.get(&place).into_iter().flatten().copied().find(|&leaf| {
                self.identity(leaf).is_some_and(|other| {
                    other.shape() == identity.shape() && other.strides() == identity.strides()
                })
            });
            if let Some(of) = same {
                self.leaf(parent, component, Leaf::Alias(of));
                return Ok(());
            }
            let number = self.flat.leaves.len() as u32;
            self.ties.entry(place).or_default().push(number);
            if let Some(original) = original {
                self.originals.insert(number, original);
            }
        }
        self.leaf(parent, component, Leaf::Array { dtype, buffer, immutable });
        Ok(())
    }

    /// Adds a copy of an array, which Python made because the original has other memory or another
    /// layout: `("copied", array, id of the original, library)`.
    pub(super) fn store_copy(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        answer: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        if self.is_left_out(parent, component.as_ref()) {
            return Ok(());
        }
        let key: Option<String> = answer.get_item(2)?.extract()?;
        self.library = Some(Arc::from(answer.get_item(3)?.extract::<String>()?));
        if let Some(&of) = key.as_ref().and_then(|key| self.copies.get(key)) {
            self.leaf(parent, component, Leaf::Alias(of));
            return Ok(());
        }
        if let Some(key) = key {
            self.copies.insert(key, self.flat.leaves.len() as u32);
        }
        let array = answer.get_item(1)?;
        let Some(dtype) = self.dtypes.of(self.hooks, &array)? else {
            return Err(self.refuse(parent, component, array.py(), "its dtype cannot be stored"));
        };
        let buffer = HeldBuffer::new(&array, false)?;
        // Only this walk has the copy.
        self.leaf(parent, component, Leaf::Array { dtype, buffer, immutable: true });
        Ok(())
    }

    /// Adds an array in several buffers: `("sharded", dtype, shape, [(offset, array, immutable,
    /// holders), …], library)`. See [`holders`].
    pub(super) fn store_shards(
        &mut self,
        parent: Option<u32>,
        component: Option<Component>,
        answer: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = answer.py();
        let dtype = dtype_named(&answer.get_item(1)?.extract::<String>()?)?;
        let shape: Vec<u64> = answer.get_item(2)?.extract()?;
        let arrays = Arc::clone(&self.arrays);
        let mut shards = Vec::new();
        for shard in answer.get_item(3)?.try_iter()? {
            let shard = shard?;
            let array = shard.get_item(1)?;
            let known = arrays.array(&array);
            let held = known.map(|known| self.hold_as(known, &array)).transpose()?.flatten();
            let held = match held {
                Some((held, buffer, _)) if held == dtype => buffer,
                Some(_) => return Err(self.refuse(parent, component, py, "its parts differ in dtype")),
                None => HeldBuffer::new(&array, false)?,
            };
            let offset: Vec<u64> = shard.get_item(0)?.extract()?;
            let region = Region { offset: offset.into(), extent: held.dims().into() };
            let holders = holders(&shard)?;
            shards.push(Shard { region, buffer: held, immutable: shard.get_item(2)?.extract()?, holders });
        }
        if let Some(library) = answer.get_item(4)?.extract::<Option<String>>()? {
            self.library = Some(Arc::from(library));
        }
        self.leaf(parent, component, Leaf::Sharded { dtype, shape, shards });
        Ok(())
    }

    /// Returns the memory that decides whether another array is tied to this leaf.
    fn identity(&self, leaf: u32) -> Option<&HeldBuffer> {
        self.originals.get(&leaf).or_else(|| match self.flat.leaves.get(leaf as usize) {
            Some(Leaf::Array { buffer, .. }) => Some(buffer),
            _ => None,
        })
    }
}

/// Returns the holders of a shard from its description: missing or `None` for this process alone,
/// `(index, count)` for one of several replicas, a list of ranks, or `"everyone"`.
fn holders(shard: &Bound<'_, PyAny>) -> PyResult<Holders> {
    if shard.len()? < 4 {
        return Ok(Holders::This);
    }
    let described = shard.get_item(3)?;
    if described.is_none() {
        return Ok(Holders::This);
    }
    if described.is_instance_of::<PyString>() {
        return Ok(Holders::Everyone);
    }
    if let Ok((index, count)) = described.extract::<(u32, u32)>()
        && described.is_instance_of::<PyTuple>()
    {
        return Ok(Holders::Replicas { index, count });
    }
    Ok(Holders::Ranks(described.extract::<Vec<u32>>()?.into()))
}
