// tw_dma: one DMA channel; executes dma_load, dma_store and dma_fill.
//
// Implements "DMA channel" of docs/concepts/microarchitecture.md. States IDLE, LAT, DATA; in DATA
//   source: reads the units of the source memory into a FIFO of four,
//   mover:  cuts the bytes into chunks that lie in one source unit and one sink unit each, shifts
//           them into place, limited by the bus budget, and
//   sink:   collects the chunks of a unit, then writes it from an output register.
// A load reads DDR (units of G bytes) and writes SRAM (W bytes), a store the other way round; both
// use the same data path, which is as wide as the larger unit. All requests depend on registers
// only, so that grants may be combinational.

module tw_dma
  import tw_pkg::*;
#(
    /* verilator lint_off UNUSEDPARAM */
    parameter int unsigned CHANNEL = 0  // names the channel in waveforms; all behave alike
    /* verilator lint_on UNUSEDPARAM */
) (
    input  logic          clk,
    input  logic          rst,
    input  logic [7:0]    fault,
    input  logic          head_valid,
    input  logic [511:0]  head,
    output logic          pop,
    output logic          done,
    output logic [31:0]   done_signals,
    output logic          idle,
    input  logic          tick,
    output sram_request_t sram_request,
    input  logic          sram_granted,
    input  logic [WB-1:0] sram_data,
    output ddr_request_t  ddr_request,
    input  logic          ddr_granted,
    input  logic [GB-1:0] ddr_data
);
  localparam int unsigned UNIT = W > G ? W : G;    // bytes of the data path
  localparam int unsigned NARROW = W > G ? G : W;  // the longest chunk
  localparam int unsigned UB = 8 * UNIT;
  localparam int unsigned NB = 8 * NARROW;
  localparam int unsigned COUNTER_BITS = $clog2(DMA_STREAM_LATENCY + 1);
  localparam int unsigned W_BITS = $clog2(W);
  localparam logic signed [10:0] BUS = 11'(DMA_BUS);

  wire f_ddr_high_bits = FAULTS_BUILT && fault == FAULT_DDR_HIGH_BITS;
  wire f_burst_boundary = FAULTS_BUILT && fault == FAULT_BURST_BOUNDARY;
  wire f_pad_off_by_one = FAULTS_BUILT && fault == FAULT_PAD_OFF_BY_ONE;
  wire f_store_mask = FAULTS_BUILT && fault == FAULT_STORE_MASK;

  // ---- State, and the instruction with its three kinds brought to one form.
  typedef enum logic [1:0] {IDLE, LAT, DATA} state_t;
  state_t state_q;
  logic [COUNTER_BITS-1:0] counter_q;

  logic is_store_q, is_fill_q, stream_q;
  logic [31:0] signals_q;
  logic [7:0] fill_q;
  logic [39:0] ddr_q;
  logic [23:0] sram_q;
  logic [20:0] run_bytes_q;
  logic [13:0] data1_q, data2_q;  // counts less one, of data runs
  logic [14:0] all1_q, all2_q;    // and with padding
  logic [11:0] all3_q;
  logic [7:0] low1_q, low2_q;     // padding before dimensions 1 and 2
  logic [31:0] ddr_stride1_q, ddr_stride2_q, ddr_stride3_q;
  logic [31:0] sram_stride1_q, sram_stride2_q, sram_stride3_q;

  /* verilator lint_off UNUSEDSIGNAL */  // what the sequencer consumes: wait mask, R numbers, ...
  dma_load_t copy;  // dma_store: the same fields without padding
  dma_fill_t fill;
  /* verilator lint_on UNUSEDSIGNAL */
  logic is_load, is_fill;
  logic [7:0] low1, low2, high1, high2;

  always_comb begin
    copy = dma_load_t'(head);
    fill = dma_fill_t'(head);
    is_load = copy.opcode == OP_DMA_LOAD;
    is_fill = copy.opcode == OP_DMA_FILL;
    low1 = is_load ? copy.pad1_lo : '0;
    low2 = is_load ? copy.pad2_lo : '0;
    high1 = is_load ? copy.pad1_hi : '0;
    high2 = is_load ? copy.pad2_hi : '0;
    if (f_pad_off_by_one && low1 > 8'd1) low1 = low1 - 8'd1;
  end

  wire in_lat = state_q == LAT;
  wire in_data = state_q == DATA;
  assign idle = state_q == IDLE;
  assign pop = idle && head_valid;
  assign done_signals = signals_q;

  always_ff @(posedge clk) begin
    if (rst) begin
      state_q <= IDLE;
    end else if (pop) begin
      state_q <= LAT;
    end else if (in_lat && counter_q == COUNTER_BITS'(1)) begin
      state_q <= DATA;
    end else if (done) begin
      state_q <= IDLE;
    end
  end

  always_ff @(posedge clk) begin
    if (pop) begin
      counter_q <= COUNTER_BITS'(!is_fill && copy.stream ? DMA_STREAM_LATENCY : DMA_LATENCY);
      is_store_q <= copy.opcode == OP_DMA_STORE;
      is_fill_q <= is_fill;
      stream_q <= copy.stream;
      signals_q <= copy.signal_mask;
      ddr_q <= copy.ddr;
      ddr_stride1_q <= copy.ddr_s1;
      ddr_stride2_q <= copy.ddr_s2;
      ddr_stride3_q <= copy.ddr_s3;
      low1_q <= low1;
      low2_q <= low2;
      if (is_fill) begin
        fill_q <= fill.fill;
        sram_q <= fill.sram;
        run_bytes_q <= 21'(fill.n0) + 21'd1;
        data1_q <= fill.n1;
        data2_q <= fill.n2;
        all1_q <= 15'(fill.n1);
        all2_q <= 15'(fill.n2);
        all3_q <= '0;
        sram_stride1_q <= 32'(fill.sram_s1);
        sram_stride2_q <= 32'(fill.sram_s2);
        sram_stride3_q <= '0;
      end else begin
        fill_q <= copy.fill;
        sram_q <= copy.sram;
        run_bytes_q <= 21'(copy.n0) + 21'd1;
        data1_q <= copy.n1;
        data2_q <= copy.n2;
        all1_q <= 15'(copy.n1) + 15'(low1) + 15'(high1);
        all2_q <= 15'(copy.n2) + 15'(low2) + 15'(high2);
        all3_q <= copy.n3;
        sram_stride1_q <= 32'(copy.sram_s1);
        sram_stride2_q <= 32'(copy.sram_s2);
        sram_stride3_q <= 32'(copy.sram_s3);
      end
    end else if (in_lat) begin
      counter_q <= counter_q - COUNTER_BITS'(1);
    end
  end

  // ---- The two sides by their part: sizes of units less one, base and strides.
  wire [7:0] source_low = is_store_q ? 8'(W - 1) : 8'(G - 1);
  wire [7:0] sink_low = is_store_q ? 8'(G - 1) : 8'(W - 1);
  wire [39:0] source_base = is_store_q ? 40'(sram_q) : ddr_q;
  wire [39:0] sink_base = is_store_q ? ddr_q : 40'(sram_q);
  wire [31:0] source_stride1 = is_store_q ? sram_stride1_q : ddr_stride1_q;
  wire [31:0] source_stride2 = is_store_q ? sram_stride2_q : ddr_stride2_q;
  wire [31:0] source_stride3 = is_store_q ? sram_stride3_q : ddr_stride3_q;
  wire [31:0] sink_stride1 = is_store_q ? ddr_stride1_q : sram_stride1_q;
  wire [31:0] sink_stride2 = is_store_q ? ddr_stride2_q : sram_stride2_q;
  wire [31:0] sink_stride3 = is_store_q ? ddr_stride3_q : sram_stride3_q;
  wire wraps = f_burst_boundary && !stream_q;

  // Bytes from an address to the end of its unit.
  function automatic logic [8:0] room(input logic [7:0] address, input logic [7:0] low);
    room = 9'(low) + 9'd1 - {1'b0, address & low};
  endfunction

  // ---- Source: (run, unit) pairs into the FIFO.
  logic source_done_q, last_valid_q, arriving_q;
  logic [39:0] last_unit_q;
  logic [3:0][UB-1:0] fifo_q;
  logic [1:0] fifo_in_q, fifo_out_q;
  logic [2:0] fifo_count_q;
  logic fifo_pop;

  logic [39:0] source_address;
  logic [20:0] source_left;
  logic source_final;
  logic [8:0] source_bytes;

  wire [39:0] source_unit = source_address & ~40'(source_low);
  wire source_active = in_data && !is_fill_q && !source_done_q;
  wire source_repeats = last_valid_q && last_unit_q == source_unit;
  wire source_wants = source_active && !source_repeats && fifo_count_q + 3'(arriving_q) < 3'd4;
  wire source_granted = source_wants && (is_store_q ? sram_granted : ddr_granted);
  wire source_step = source_granted || (source_active && source_repeats);

  always_comb begin
    source_bytes = room(source_address[7:0], source_low);
    if (source_left < 21'(source_bytes)) source_bytes = 9'(source_left);
  end

  /* verilator lint_off PINCONNECTEMPTY */  // only the sink side asks where in the padding it is
  tw_dma_walk source_walk (
      .clk,
      .load(in_lat),
      .base(source_base),
      .run_bytes(run_bytes_q),
      .last1(15'(data1_q)),
      .last2(15'(data2_q)),
      .last3(all3_q),
      .stride1(source_stride1),
      .stride2(source_stride2),
      .stride3(source_stride3),
      .wrap(wraps && !is_store_q),
      .step(source_step),
      .bytes(source_bytes),
      .address(source_address),
      .left(source_left),
      .index1(),
      .index2(),
      .final_step(source_final)
  );

  always_ff @(posedge clk) begin
    if (in_lat) begin
      source_done_q <= 1'b0;
      last_valid_q <= 1'b0;
      arriving_q <= 1'b0;
      fifo_in_q <= '0;
      fifo_out_q <= '0;
      fifo_count_q <= '0;
    end else begin
      arriving_q <= source_granted;
      if (source_step) begin
        source_done_q <= source_final;
        last_valid_q <= 1'b1;
        last_unit_q <= source_unit;
      end
      if (arriving_q) fifo_in_q <= fifo_in_q + 2'd1;
      if (fifo_pop) fifo_out_q <= fifo_out_q + 2'd1;
      fifo_count_q <= fifo_count_q + 3'(arriving_q) - 3'(fifo_pop);
    end
    if (arriving_q) fifo_q[fifo_in_q] <= is_store_q ? UB'(sram_data) : UB'(ddr_data);
  end

  // ---- Mover: a chunk a cycle from the held unit to the collector.
  logic all_moved_q, held_valid_q;
  logic [39:0] held_unit_q;
  logic [UB-1:0] held_q;
  logic signed [10:0] budget_q;
  logic collector_valid_q, output_valid_q;
  logic [39:0] collector_unit_q, output_unit_q;

  logic [39:0] from_address, to_address;
  logic [20:0] to_left;
  logic [14:0] index1, index2;
  logic to_final;
  logic [8:0] chunk_bytes;

  // Below the padding the difference wraps to a large number.
  wire is_data = !is_fill_q && index1 - 15'(low1_q) <= 15'(data1_q)
      && index2 - 15'(low2_q) <= 15'(data2_q);
  wire [39:0] from_unit = from_address & ~40'(source_low);
  wire [39:0] to_unit = to_address & ~40'(sink_low);
  wire [7:0] from_offset = from_address[7:0] & source_low;
  wire [7:0] to_offset = to_address[7:0] & sink_low;
  wire held_fits = held_valid_q && held_unit_q == from_unit;
  wire has_source = !is_data || held_fits || fifo_count_q != '0;
  wire collects_it = collector_unit_q == to_unit;
  wire sink_granted = is_store_q ? ddr_granted : sram_granted;
  wire can_pass = !output_valid_q || sink_granted;
  wire move = in_data && !all_moved_q && budget_q > 0 && has_source
      && (!collector_valid_q || collects_it || can_pass);
  wire pass = collector_valid_q && can_pass && (all_moved_q || (move && !collects_it));
  assign fifo_pop = move && is_data && !held_fits;
  assign done = in_data && output_valid_q && sink_granted && all_moved_q && !collector_valid_q;

  always_comb begin
    chunk_bytes = room(to_address[7:0], sink_low);
    if (is_data && room(from_address[7:0], source_low) < chunk_bytes)
      chunk_bytes = room(from_address[7:0], source_low);
    if (to_left < 21'(chunk_bytes)) chunk_bytes = 9'(to_left);
  end

  tw_dma_walk from_walk (
      .clk,
      .load(in_lat),
      .base(source_base),
      .run_bytes(run_bytes_q),
      .last1(15'(data1_q)),
      .last2(15'(data2_q)),
      .last3(all3_q),
      .stride1(source_stride1),
      .stride2(source_stride2),
      .stride3(source_stride3),
      .wrap(1'b0),
      .step(move && is_data),
      .bytes(chunk_bytes),
      .address(from_address),
      .left(),
      .index1(),
      .index2(),
      .final_step()
  );
  /* verilator lint_on PINCONNECTEMPTY */

  tw_dma_walk to_walk (
      .clk,
      .load(in_lat),
      .base(sink_base),
      .run_bytes(run_bytes_q),
      .last1(all1_q),
      .last2(all2_q),
      .last3(all3_q),
      .stride1(sink_stride1),
      .stride2(sink_stride2),
      .stride3(sink_stride3),
      .wrap(wraps && is_store_q),
      .step(move),
      .bytes(chunk_bytes),
      .address(to_address),
      .left(to_left),
      .index1,
      .index2,
      .final_step(to_final)
  );

  logic signed [10:0] budget_next;
  always_comb begin
    budget_next = budget_q;
    if (move) budget_next = budget_next - 11'(chunk_bytes);
    if (tick) budget_next = budget_next + BUS;
    if (budget_next > BUS) budget_next = BUS;
  end

  always_ff @(posedge clk) begin
    budget_q <= pop ? BUS : budget_next;
    if (in_lat) begin
      all_moved_q <= 1'b0;
      held_valid_q <= 1'b0;
    end else if (move) begin
      all_moved_q <= to_final;
      if (fifo_pop) begin
        held_valid_q <= 1'b1;
        held_unit_q <= from_unit;
        held_q <= fifo_q[fifo_out_q];
      end
    end
  end

  // The chunk, shifted from its place in the source unit to that in the sink unit.
  logic [NB-1:0] aligned;
  logic [UB-1:0] placed;
  logic [UNIT-1:0] placed_mask;
  always_comb begin
    aligned = NB'((held_fits ? held_q : fifo_q[fifo_out_q]) >> {from_offset, 3'd0});
    placed = is_data ? UB'(aligned) << {to_offset, 3'd0} : {UNIT{fill_q}};
    placed_mask = ((UNIT'(1) << chunk_bytes) - UNIT'(1)) << to_offset;
  end

  // ---- Sink: collector and output register.
  logic [UB-1:0] collector_q, output_q;
  logic [UNIT-1:0] collector_mask_q, output_mask_q;
  wire merges = collector_valid_q && collects_it;

  always_ff @(posedge clk) begin
    if (in_lat) begin
      collector_valid_q <= 1'b0;
      output_valid_q <= 1'b0;
    end else begin
      if (move) collector_valid_q <= 1'b1;
      else if (pass) collector_valid_q <= 1'b0;
      if (pass) output_valid_q <= 1'b1;
      else if (sink_granted) output_valid_q <= 1'b0;
    end
    if (move) begin
      collector_unit_q <= to_unit;
      collector_mask_q <= merges ? collector_mask_q | placed_mask : placed_mask;
      for (int unsigned i = 0; i < UNIT; i++)
        if (placed_mask[i]) collector_q[8*i+:8] <= placed[8*i+:8];
    end
    if (pass) begin
      output_unit_q <= collector_unit_q;
      output_mask_q <= collector_mask_q;
      output_q <= collector_q;
    end
  end

  // ---- Ports. In a load DDR is the source and SRAM the sink.
  wire sink_wants = in_data && output_valid_q;
  wire [39:0] ddr_address = is_store_q ? output_unit_q : source_unit;
  /* verilator lint_off UNUSEDSIGNAL */  // a whole word, in SRAM
  wire [39:0] sram_address = is_store_q ? source_unit : output_unit_q;
  /* verilator lint_on UNUSEDSIGNAL */

  always_comb begin
    sram_request.valid = is_store_q ? source_wants : sink_wants;
    sram_request.write = !is_store_q;
    sram_request.address = sram_address[W_BITS+:WORD_ADDRESS_BITS];
    sram_request.mask = W'(output_mask_q);
    sram_request.data = WB'(output_q);

    ddr_request.valid = is_store_q ? sink_wants : source_wants;
    ddr_request.write = is_store_q;
    ddr_request.burst = !stream_q;
    ddr_request.address = f_ddr_high_bits ? {4'd0, ddr_address[35:0]} : ddr_address;
    ddr_request.mask = f_store_mask && stream_q ? '1 : G'(output_mask_q);
    ddr_request.data = GB'(output_q);
  end
endmodule
