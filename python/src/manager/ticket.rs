//! The right to save one step of a manager, as Python sees it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use stepwell_manager::{SaveRequest, Ticket as EngineTicket};

use super::{Manager, json};
use crate::errors::raise_manager;
use crate::events::Events;
use crate::save_handle::SaveHandle;
use crate::snapshot::{OnDevices, Snapshot, request};
use crate::state::{ChoiceArguments, flatten};
use crate::wait;

/// The right to save one step. On several ranks, dropping it unused ends the save on all ranks.
#[pyclass(frozen, module = "stepwell._core")]
pub struct Ticket {
    manager: Py<Manager>,
    step: u64,
    unused: Mutex<Option<EngineTicket>>,
    /// The reason why it is not used, for the other ranks.
    cause: Arc<OnceLock<String>>,
}

impl Ticket {
    pub(super) fn new(manager: &Bound<'_, Manager>, ticket: EngineTicket) -> Self {
        let (step, cause) = (ticket.step(), ticket.cause());
        Self { manager: manager.clone().unbind(), step, unused: Mutex::new(Some(ticket)), cause }
    }

    fn take(&self) -> Option<EngineTicket> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Ticket {
    /// Saves a state, and returns when it is captured. `on_devices` describes the CUDA devices of
    /// the state: their current streams, and the memory that changes only in guarded updates. An
    /// interrupt ends the save. When it raises, the state is no longer read.
    #[expect(clippy::too_many_arguments, reason = "the arguments of `save`, one by one")]
    fn save(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyAny>,
        choice: ChoiceArguments,
        metrics: BTreeMap<String, f64>,
        custom_metadata: &str,
        snapshot: &str,
        on_devices: &Bound<'_, PyAny>,
        events: &Events,
    ) -> PyResult<SaveHandle> {
        let manager = self.manager.get();
        manager.check_before_saving(py, self.step)?;
        let state = flatten(state, choice, manager.inner.ranks().1 == 1)?;
        let (streams, attached): (HashMap<u32, u64>, _) = on_devices.call1((state.devices()?,))?.extract()?;
        let devices = OnDevices::new(py, &streams, attached)?;
        let (request, parcel) = request(py, self.step, &state, Snapshot::named(snapshot)?, devices, events)?;
        let unsupported = parcel.flat().map(|flat| flat.unsupported.clone()).unwrap_or_default();
        let request = SaveRequest { metrics, custom_metadata: json(custom_metadata)?, ..request };
        let cancel = Arc::clone(&request.cancel);
        let ticket = self.take().ok_or_else(|| PyRuntimeError::new_err("this ticket was used before"))?;
        let inner = Arc::clone(&manager.inner);
        let planned = if inner.ranks().1 > 1 {
            // The ranks may have to exchange their leaves, which may take long.
            let (inner, saving) = (Arc::clone(&inner), Arc::clone(&manager.saving));
            // After an interrupt, the thread drops the plan before the share.
            let (planned, _) = wait::on_thread(py, move || (inner.plan(ticket, request), saving))?;
            planned
        } else {
            py.detach(|| inner.plan(ticket, request))
        };
        let ready = planned.map_err(|error| raise_manager(py, &error))?;
        let save = if inner.begins_at_once(&ready) {
            // It does not wait. A thread of its own would take longer than the call.
            py.detach(|| inner.begin(ready))
        } else {
            wait::until_stopped(
                py,
                &cancel,
                move || inner.begin(ready),
                // It was captured before it could be stopped, so it goes on. The manager reports
                // its failure like that of any other save.
                |late| late.into_iter().for_each(|save| manager.remember(&save)),
            )?
        }
        .map_err(|error| raise_manager(py, &error))?;
        manager.remember(&save);
        parcel.give_back(py);
        Ok(SaveHandle::new(save).without(unsupported))
    }

    /// Ends the save on all ranks because the caller has raised, unless this ticket was used.
    fn fail(&self, py: Python<'_>, cause: String) -> PyResult<()> {
        let _ = self.cause.set(cause);
        match self.take() {
            Some(ticket) if self.manager.get().inner.ranks().1 > 1 => {
                self.manager.get().query(py, move |_| {
                    drop(ticket);
                    Ok(())
                })
            }
            _ => Ok(()),
        }
    }
}
