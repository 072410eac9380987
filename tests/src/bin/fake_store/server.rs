//! Answers the requests of a connection.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use crate::call::{Call, Refusal};
use crate::control::{Control, Fault, Plan};
use crate::http::{Answer, Body, Connection, Incoming, Request};
use crate::objects::Objects;
use crate::{azure, s3};

/// The delay of [`Fault::Slow`].
const SLOW: Duration = Duration::from_secs(2);
/// The delay of [`Fault::Late`].
const LATE: Duration = Duration::from_secs(1);

/// How requests and answers look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    S3,
    /// The XML API of Google Cloud Storage.
    Google,
    Azure,
}

/// A request for a bucket.
pub struct Asked {
    pub bucket: String,
    pub call: Call,
}

/// See the module documentation.
pub struct Server {
    dialect: Dialect,
    objects: Objects,
    control: Control,
}

/// The state of the connection after an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Open,
    Close,
}

impl Server {
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, objects: Objects::new(dialect == Dialect::Azure), control: Control::default() }
    }

    /// Serves a connection until the client or a fault closes it.
    pub fn serve(self: &Arc<Self>, stream: &TcpStream) {
        let mut connection = Connection::new(stream);
        while let Ok(incoming) = connection.read() {
            let after = match incoming {
                Incoming::Closed => return,
                Incoming::Bad => {
                    let _ = connection.write(&self.refused(Refusal::Malformed), None);
                    return;
                }
                Incoming::Request(request) => match request.path.strip_prefix("/_control/") {
                    Some(path) => {
                        let answer = self.control.answer(path, &request.body);
                        connection.write(&answer, None).map(|_| After::Open)
                    }
                    None => self.answer(&request, &mut connection),
                },
            };
            if !matches!(after, Ok(After::Open)) {
                return;
            }
        }
    }

    fn refused(&self, refusal: Refusal) -> Answer {
        match self.dialect {
            Dialect::S3 | Dialect::Google => s3::refused(refusal, self.dialect),
            Dialect::Azure => azure::refused(refusal),
        }
    }

    fn send(
        &self,
        request: &Request,
        connection: &mut Connection<'_>,
        mut answer: Answer,
        limit: Option<u64>,
    ) -> io::Result<()> {
        answer.is_head = request.method == "HEAD";
        self.control.sent(connection.write(&answer, limit)?);
        Ok(())
    }

    fn answer(self: &Arc<Self>, request: &Request, connection: &mut Connection<'_>) -> io::Result<After> {
        let parsed = match self.dialect {
            Dialect::S3 | Dialect::Google => s3::parsed(request),
            Dialect::Azure => azure::parsed(request),
        };
        let asked = match parsed {
            Ok(asked) => asked,
            Err(refusal) => {
                self.send(request, connection, self.refused(refusal), None)?;
                return Ok(After::Open);
            }
        };
        let names = ["authorization", "x-amz-security-token"];
        let credentials: Vec<&str> = names.iter().filter_map(|name| request.header(name)).collect();
        let kind = asked.call.kind();
        let plan = self.control.begin(kind, request.body.len() as u64, &credentials);
        let after = self.answer_as_planned(asked, &plan, request, connection);
        self.control.end(kind);
        after
    }

    fn answer_as_planned(
        self: &Arc<Self>,
        mut asked: Asked,
        plan: &Plan,
        request: &Request,
        connection: &mut Connection<'_>,
    ) -> io::Result<After> {
        let send =
            |connection: &mut Connection<'_>, answer, limit| self.send(request, connection, answer, limit);
        if let Some(is_applied) = plan.halted {
            if is_applied {
                self.applied(&asked, request);
            }
            self.control.wait_for_halt();
            return Ok(After::Close);
        }
        if !has_credentials(request) && !asked.bucket.starts_with("public") {
            send(connection, self.refused(Refusal::Denied), None)?;
            return Ok(After::Open);
        }
        if let (Call::List(listing), Some(page)) = (&mut asked.call, plan.page) {
            listing.limit = listing.limit.min(page as usize);
        }
        if plan.fault == Some(Fault::Late) {
            self.apply_late(asked, request);
            return Ok(After::Close);
        }
        let mut answer = match self.early(&asked, plan) {
            Some(answer) => answer,
            None => self.applied(&asked, request),
        };
        match plan.fault {
            Some(Fault::Drop) => return Ok(After::Close),
            Some(Fault::Wrong) if answer.status == 206 => {
                answer.body = Body::Bytes(answer.body.flipped(plan.random));
            }
            Some(Fault::Slow) => std::thread::sleep(SLOW),
            Some(Fault::Reorder) => self.control.wait_for_answers(plan.random % 4 + 1),
            _ => {}
        }
        std::thread::sleep(plan.latency);
        if plan.fault == Some(Fault::Cut) {
            let half = answer.body.len() / 2;
            send(connection, answer, Some(half))?;
            return Ok(After::Close);
        }
        send(connection, answer, None)?;
        Ok(After::Open)
    }

    /// The answer to a request that is not applied.
    fn early(&self, asked: &Asked, plan: &Plan) -> Option<Answer> {
        if plan.is_excess {
            return Some(self.refused(Refusal::SlowDown));
        }
        if plan.is_expired {
            return Some(self.refused(Refusal::Expired));
        }
        if let Some(region) = plan.region.as_ref().filter(|_| self.dialect == Dialect::S3) {
            return Some(s3::redirected(region, &asked.bucket));
        }
        let refusal = match plan.fault? {
            Fault::Conflict if asked.call.kind() == "create" => Refusal::Conflict,
            Fault::Conflict | Fault::Unavailable => Refusal::SlowDown,
            Fault::Forget => Refusal::Internal,
            Fault::Busy => Refusal::Busy,
            Fault::Expire => Refusal::Expired,
            Fault::Html => {
                let page = "<html><body><h1>502 Bad Gateway</h1></body></html>";
                return Some(Answer::new(502, "text/html", page));
            }
            Fault::Login => {
                let page = "<html><head><title>Log in</title></head><body><p>Log in</p></body></html>";
                return Some(Answer::new(200, "text/html", page));
            }
            _ => return None,
        };
        Some(self.refused(refusal))
    }

    fn applied(&self, asked: &Asked, request: &Request) -> Answer {
        let checksum = request.header(s3::CHECKSUM);
        let done = self.objects.apply(&asked.bucket, &asked.call, Arc::clone(&request.body), checksum);
        match done {
            Ok(done) if self.dialect == Dialect::Azure => azure::answer(&asked.call, done),
            Ok(done) => s3::answer(asked, done, self.dialect, checksum.is_some()),
            Err(refusal) => self.refused(refusal),
        }
    }

    /// Applies a request after a while. Nobody hears the answer.
    fn apply_late(self: &Arc<Self>, asked: Asked, request: &Request) {
        let (server, body) = (Arc::clone(self), Arc::clone(&request.body));
        std::thread::spawn(move || {
            std::thread::sleep(LATE);
            let _ = server.objects.apply(&asked.bucket, &asked.call, body, None);
        });
    }
}

/// True if a request has credentials of some kind.
fn has_credentials(request: &Request) -> bool {
    let signatures = ["X-Amz-Signature", "X-Goog-Signature", "sig"];
    request.header("authorization").is_some_and(|text| text.trim() != "Bearer")
        || signatures.iter().any(|name| request.parameter(name).is_some())
}
