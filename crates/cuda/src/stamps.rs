//! Time stamps on the stream.

use cudarc::driver::result::DriverError;

use crate::gpu::{Event, Stream};
use crate::graphs::Graphs;

/// Stamps not read yet, in order.
#[derive(Debug, Default)]
pub(crate) struct Stamps {
    pending: Vec<Pending>,
    spare: Vec<Event>,
}

#[derive(Debug)]
enum Pending {
    One(Event),
    /// Those in a recording that was submitted.
    Replay(u64),
}

impl Stamps {
    pub(crate) fn stamp(&mut self, stream: &Stream) -> Result<(), DriverError> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event::timed()?,
        };
        event.record(stream)?;
        self.pending.push(Pending::One(event));
        Ok(())
    }

    /// A stamp inside a recording.
    pub(crate) fn record(stamps: &mut Vec<Event>, stream: &Stream) -> Result<(), DriverError> {
        let event = Event::timed()?;
        event.record_in_graph(stream)?;
        stamps.push(event);
        Ok(())
    }

    /// A recording with stamps was submitted.
    pub(crate) fn replayed(&mut self, key: u64) {
        self.pending.push(Pending::Replay(key));
    }

    pub(crate) fn forget(&mut self) {
        self.pending.clear();
    }

    /// Seconds of all stamps after the first. The stream must be idle. A recording that was submitted
    /// more than once meanwhile gives the times of its last run each time.
    pub(crate) fn take(&mut self, graphs: &Graphs) -> Result<Vec<f64>, DriverError> {
        let pending = std::mem::take(&mut self.pending);
        let mut events: Vec<&Event> = Vec::new();
        for one in &pending {
            match one {
                Pending::One(event) => events.push(event),
                Pending::Replay(key) => {
                    events.extend(graphs.get(*key).iter().flat_map(|g| &g.stamps))
                }
            }
        }
        let Some(&first) = events.first() else { return Ok(Vec::new()) };
        let times = events.iter().map(|event| event.seconds_since(first)).collect();
        self.spare.extend(pending.into_iter().filter_map(|one| match one {
            Pending::One(event) => Some(event),
            Pending::Replay(_) => None,
        }));
        times
    }
}
